"""One run: start, load and faults beside each other, calm, checks, report."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import checks, report
from tests.chaos.asks import Sizes, plan_shapes
from tests.chaos.cluster import ChaosCluster, Shape
from tests.chaos.evidence import too_little
from tests.chaos.expected import Expected, compute_expected
from tests.chaos.faults import Saboteur
from tests.chaos.load import Load, Outcome
from tests.chaos.memory import MemoryWatch
from tests.chaos.plan import Fault, Kind, plan_faults
from tests.chaos.report import Violation
from tests.chaos.stalls import StallWatch

PROGRESS_S = 5.0
LAST_ANSWERS_S = 120.0  # for what runs when the load stops


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path
    directory: Path  # of logs and stores
    seed: int
    seconds: float
    sizes: Sizes
    num_shapes: int
    num_workers: int
    kinds: tuple[Kind, ...]
    shape: Shape
    command: str  # that runs it again


class ChaosRun:
    """`say` takes lines of text. `violations` is empty if all was well."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._cluster = ChaosCluster(settings.model, settings.directory, settings.shape)
        self._memory = MemoryWatch()
        self._stalls = StallWatch()
        self.violations: list[Violation] = []
        self._started = 0.0

    async def run(self) -> None:
        settings = self._settings
        faults = plan_faults(settings.seed, settings.seconds, settings.kinds, settings.shape.victims)
        self._say(f"seed {settings.seed}; again: {settings.command}")
        self._say(f"logs in {settings.directory}; {len(faults)} faults planned")
        self._say(report.what_comes(settings.seconds))
        expected = await self._prepare()
        self._started = time.monotonic()
        saboteur = Saboteur(self._cluster, faults, self._complain)
        load = Load(self._cluster, expected, settings.seed, settings.num_workers, saboteur.excuses, self._stalls)
        watching = [asyncio.create_task(self._watch(load, saboteur)), asyncio.create_task(self._stalls.run())]
        try:
            await self._load_and_strike(load, saboteur)
            await self._check()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        self._say(report.summary(self._cluster, load, saboteur.records, self._memory, self._stalls))
        self._collect(load)
        for what in too_little(load.tries, faults, saboteur.records):
            self._complain_now(what)
        await self._drain()
        self._show(saboteur, expected, faults)

    def kill(self) -> None:
        self._cluster.kill()

    async def _prepare(self) -> list[Expected]:
        """The answers, while the cluster starts; then the process that computed them is gone."""
        settings, loop = self._settings, asyncio.get_running_loop()
        shapes = plan_shapes(settings.seed, settings.num_shapes, settings.sizes)
        with one_process() as pool:
            computing = loop.run_in_executor(
                pool, compute_expected, settings.model, shapes, settings.sizes.num_blocks, settings.sizes.eos_token_ids
            )
            try:
                self._say(f"starting the cluster, and computing {settings.num_shapes} answers to compare with")
                await self._cluster.open()
                self._say("the cluster is up")
                expected = await self._say_until_done(computing)
            finally:
                computing.cancel()
        for victim in self._cluster.shape.victims:
            if not await self._cluster.wait_whole(victim, PROGRESS_S * 6):
                self._complain_now(f"{victim.name} did not join")
        return expected

    async def _say_until_done(self, computing: asyncio.Future[list[Expected]]) -> list[Expected]:
        while not (await asyncio.wait({computing}, timeout=PROGRESS_S))[0]:
            self._say("... still computing the answers to compare with")
        return await computing

    async def _load_and_strike(self, load: Load, saboteur: Saboteur) -> None:
        loading = asyncio.create_task(load.run())
        await asyncio.gather(saboteur.run(self._settings.seconds), asyncio.sleep(self._settings.seconds))
        load.stop()
        try:
            async with asyncio.timeout(LAST_ANSWERS_S):
                await loading
        except TimeoutError:
            self._complain_now(f"{load.num_open} requests did not end within {LAST_ANSWERS_S:.0f} s")

    async def _check(self) -> None:
        for what in (
            *await checks.still_held(self._cluster),
            *await checks.not_ready(self._cluster),
            *checks.tracebacks(self._cluster),
        ):
            self._complain_now(what)
        self._sample_memory()
        for what in checks.grown(self._cluster, self._memory):
            self._complain_now(what)

    async def _drain(self) -> None:
        codes = await self._cluster.close()
        wrong = {victim.name: code for victim, code in codes.items() if code != 0}
        if wrong:
            self._complain_now(f"exit codes after the drain at the end: {wrong}")

    def _collect(self, load: Load) -> None:
        for one in load.tries:
            if one.outcome is Outcome.WRONG:
                at = one.ended_at or time.monotonic()
                self.violations.append(Violation("\n".join(one.problems), at, one))

    async def _watch(self, load: Load, saboteur: Saboteur) -> None:
        said = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            self._sample_memory()
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                num_violations = len(self.violations) + sum(one.outcome is Outcome.WRONG for one in load.tries)
                self._say(report.progress(self._started, load, saboteur, num_violations))

    def _sample_memory(self) -> None:
        now = time.monotonic()
        for victim, process in self._cluster.processes.items():
            if process.running and process.process is not None:
                self._memory.sample(victim, process.process.pid, now)

    def _complain(self, what: str, fault: Fault) -> None:
        self._complain_now(f"{what} (fault {fault})")

    def _complain_now(self, what: str) -> None:
        self.violations.append(Violation(what, time.monotonic()))
        self._say(f"VIOLATION: {what}")

    def _show(self, saboteur: Saboteur, expected: Sequence[Expected], faults: Sequence[Fault]) -> None:
        settings = self._settings
        if not self.violations:
            self._say(f"\nno violation; seed {settings.seed}")
            return
        self._say(f"\nthe plan\n{report.plan_text(faults)}\n\n{report.logs(self._cluster)}\n")
        for violation in sorted(self.violations, key=lambda one: one.at)[: report.NUM_SHOWN]:
            args = (settings.seed, settings.command, violation, self._started, saboteur.records, expected)
            self._say(report.explain(*args) + "\n")
        self._say(f"{len(self.violations)} violations; seed {settings.seed}; again: {settings.command}")


@contextmanager
def one_process() -> Iterator[ProcessPoolExecutor]:
    """What it still computes when the block is left, for whatever reason, is not waited for."""
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        finally:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()


async def run_chaos(settings: Settings, say: Callable[[str], None]) -> list[Violation]:
    """What was wrong; nothing is left running."""
    run = ChaosRun(settings, say)
    try:
        await run.run()
    finally:
        with suppress(ProcessLookupError):
            run.kill()
    return run.violations
