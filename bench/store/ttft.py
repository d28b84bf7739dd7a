"""First tokens of prompts whose prefix the store has, by where it has it, against computing them.

One cluster a round: coordinator, store, a prefill and a decode node. All prompts are computed first; that is the line
to compare with. Each is asked again with its blocks in the store's memory, and after the store came back without any:
from a file in the page cache, and from one that is not. The nodes' pools hold one long prompt, so that no prompt is
found there again.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Mapping

from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import info_of
from bench.store import page_cache
from bench.store.asking import BLOCK_TOKENS, TAIL_TOKENS, Asker, Prompt, Prompts, make_cluster, running
from bench.store.plan import TTFT, Effort, Setting

BREAK_EVEN = "break-even"
LOADED = "loaded"
COMPUTED = "computed"
MEMORY = "memory"
WARM = "disk, page cache warm"
COLD = "disk, cold"
SHORTEST = "shortest prefix, tokens, from which on it is not slower than computing"
WAKING_TOKENS = 128
NUM_WAKING = 5  # for each time that the store comes back
SPARE_BLOCKS = 3


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    asyncio.run(_measure(setting, samples, round_number))


async def _measure(setting: Setting, samples: Samples, round_number: int) -> None:
    effort = setting.effort
    num_blocks = (effort.prefix_tokens + TAIL_TOKENS) // BLOCK_TOKENS + SPARE_BLOCKS
    cluster = make_cluster(setting.model, setting.directory, num_blocks, with_store=True)
    draw = Prompts(round_number, info_of(str(setting.model)).vocab_size)
    try:
        async with running(cluster) as asker:
            await _Round(asker, effort, draw, samples).measure()
    finally:
        shutil.rmtree(cluster.directory)


class _Round:
    def __init__(self, asker: Asker, effort: Effort, draw: Prompts, samples: Samples) -> None:
        self._asker = asker
        self._samples = samples
        self._draw = draw
        self._waking = draw.of(WAKING_TOKENS, 2 * NUM_WAKING)
        # The long ones first: they drive what was asked before out of the nodes' pools.
        self._prompts = {effort.prefix_tokens: draw.of(effort.prefix_tokens, effort.num_prompts)}
        self._prompts |= {length: draw.of(length, effort.num_short) for length in effort.short_prefixes}

    async def measure(self) -> None:
        await self._warm_up()
        computed = await self._ask_all(COMPUTED)
        found = {MEMORY: await self._ask_all(MEMORY)}
        await self._restart(cold=False)
        found[WARM] = await self._ask_all(WARM)
        await self._restart(cold=True)
        found[COLD] = await self._ask_all(COLD)
        for line, times in found.items():
            self._samples.add(BREAK_EVEN, line, SHORTEST, break_even(times, computed))

    async def _warm_up(self) -> None:
        for prompt in [*self._draw.of(WAKING_TOKENS, 2), *self._waking]:
            await self._asker.compute(prompt)
            await self._asker.note_stored([prompt])

    async def _ask_all(self, line: str) -> dict[int, float]:
        """Medians by the length of the prefix."""
        medians = {}
        for length, prompts in self._prompts.items():
            times = [await self._ask(line, length, prompt) for prompt in prompts]
            medians[length] = statistics.median(times)
            self._samples.add(TTFT, line, column_of(length), medians[length])
        return medians

    async def _ask(self, line: str, length: int, prompt: Prompt) -> float:
        if line == COMPUTED:
            seen = await self._asker.compute(prompt)
            await self._asker.note_stored([prompt])  # so that nothing is put while the next one is computed
            return seen.ttft_s
        seen = await self._asker.ask(prompt)
        from_tier = seen.cached.memory if line == MEMORY else seen.cached.disk
        assert seen.cached.total == from_tier, f"{line}, a prefix of {length}: {seen.cached}"
        # The node may compute the start of it while the rest comes, or find that computing a short one is faster.
        self._samples.add(LOADED, line, column_of(length), from_tier)
        assert from_tier or length <= WAKING_TOKENS, f"{line}, a prefix of {length}: nothing was loaded"
        return seen.ttft_s

    async def _restart(self, *, cold: bool) -> None:
        """The store has nothing in memory then; `cold`: nor has the page cache anything of its file."""
        await asyncio.to_thread(self._restart_store, cold)
        await self._asker.reach_store(self._waking)

    def _restart_store(self, cold: bool) -> None:
        store, directory = self._asker.store, self._asker.cluster.directory
        store.stop()
        if cold:
            page_cache.drop(directory / "store" / "data.mdb")
        store.restart()


def break_even(times: Mapping[int, float], computed: Mapping[int, float]) -> float:
    """The shortest of the lengths from which on no longer one takes more time than computing it."""
    lengths = sorted(times)
    slower = [length for length in lengths if times[length] > computed[length]]
    faster = [length for length in lengths if length > max(slower, default=0)]
    return faster[0] if faster else float("inf")


def column_of(num_tokens: int) -> str:
    return f"{num_tokens:,}"


def bars(effort: Effort) -> list[Bar]:
    column = column_of(effort.prefix_tokens)
    computed = (TTFT, COMPUTED, column)
    goals = {MEMORY: 0.08, WARM: 0.10, COLD: 0.15}
    ratios = [
        Bar(f"first token, {column} tokens, {line}, over computed", (TTFT, line, column), computed, most=most)
        for line, most in goals.items()
    ]
    shortest = [
        Bar(f"break-even, {line}, tokens", (BREAK_EVEN, line, SHORTEST), most=64) for line in goals
    ]  # fmt: skip
    return [*ratios, *shortest]
