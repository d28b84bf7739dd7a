"""What clients see when a role dies, hangs, drains, is cut off or becomes slow, at every stage of a request.

Real processes, a tiny random model, two nodes of each kind, every link through a fault proxy. One run hits one role
with one fault while requests are at every stage at once, greedy and seeded ones; a cell of the matrix is
`[role-fault-stage]`, and fails alone.

Cells that say less than their name, and why:

- `kvstore-*`: the store has no part in reservation, handoff or decoding. Its fault comes while requests are at the
  stage, those that look for a prefix next among them, and costs only time.
- `prefill-*-mid_decode`: the prompt's KV was committed before; nothing is retried.
- `decode-*-at_end`: the coordinator counts tokens itself. When the last one is there, what is lost is only the word
  that it was; one whose last token was still on its way is resumed.
- `prefill-*-at_end`: what is lost is the prefill node's account of a committed prompt; the answer does not wait for it.
- `coordinator-kill`, `-stop` and `-cut`: its clients' streams end with it. They get UNAVAILABLE, the nodes free
  everything as soon as its calls to them break, and what is asked of it when it is back equals the reference.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import UnavailableError
from kvrelay.sampling import SamplingParams
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import RoleProcess, running
from tests.support.in_flight import (
    IN_CHUNKS,
    PROMPT_TOKENS,
    Flight,
    InFlight,
    Reference,
    Stage,
    flight,
    make_prompt,
)
from tests.support.proxied_cluster import ProxiedCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_NODES = 4
SLOW_BYTES_PER_S = 128_000  # 16 slabs of the tiny model, for some eight handoffs at once and all their tokens
BOUND_S = 60.0  # from the fault to the end of every answer, the long ones too, on a machine that does much else
SLOW_BOUND_S = 80.0
UNAVAILABLE_BOUND_S = 20.0  # sooner than any lease or sender gives up
PATIENT_S = (
    120  # of leases and senders: no request is given up before the fault; and what is free at the end was let go
)
WELL_WITHIN_S = 60.0
WARM_UP = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
WARM_UP_SEEDS = 5_000  # from a run's first seed on


class Fault(Enum):
    KILL = "kill"
    STOP = "stop"
    TERM = "term"
    CUT = "cut"
    SLOW = "slow"


ROLES = ("prefill", "decode", "kvstore", "coordinator")
HURTS = (Fault.KILL, Fault.STOP, Fault.CUT)  # a fault that takes the role away while it lasts


@dataclass
class Run:
    """One fault on one role, and what became of every request."""

    role: str
    fault: Fault
    requests: list[InFlight]
    faulted_at: float
    exit_code: int | None

    @property
    def ends_clients(self) -> bool:
        return self.role == "coordinator" and self.fault in HURTS


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    directory = tmp_path_factory.mktemp("matrix")
    shape = ProxiedCluster(
        model,
        directory,
        num_prefill=2,
        num_decode=2,
        num_blocks=512,
        prefill_args=[*IN_CHUNKS, "--handoff-stall-s", f"{PATIENT_S}"],
        decode_args=["--lease-s", f"{PATIENT_S}"],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in "".join(role.log_path.read_text() for role in shape.roles)


CASES = [(role, fault) for fault in Fault for role in ROLES]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].value}")
def run(request: pytest.FixtureRequest, cluster: ProxiedCluster) -> Run:
    role, fault = request.param
    return asyncio.run(strike(cluster, role, fault, seed=10_000 * (1 + CASES.index((role, fault)))))


def victim_of(cluster: ProxiedCluster, role: str, fault: Fault) -> RoleProcess:
    """The two nodes of a kind in turn."""
    assert cluster.store is not None
    index = list(Fault).index(fault) % 2
    return {
        "prefill": cluster.prefill[index],
        "decode": cluster.decode[index],
        "kvstore": cluster.store,
        "coordinator": cluster.coordinator,
    }[role]


async def strike(cluster: ProxiedCluster, role: str, fault: Fault, seed: int) -> Run:
    victim = victim_of(cluster, role, fault)
    await until_well(cluster, itertools.count(seed + WARM_UP_SEEDS))  # also after a run that failed
    async with flight(cluster, victim, seed) as under_way:
        await under_way.launch_all()
        faulted_at = time.monotonic()
        begin(cluster, fault, victim)
        for _ in range(2):
            under_way.launch(Stage.BEFORE_RESERVE)
        under_way.release(of_victim=fault not in HURTS)
        bound_s = SLOW_BOUND_S if fault is Fault.SLOW else BOUND_S
        await under_way.all_over(bound_s + faulted_at - time.monotonic())
        exit_code = await end(cluster, fault, victim, under_way)
    await until_quiet(cluster)  # sooner than any lease ends
    return Run(role, fault, under_way.requests, faulted_at, exit_code)


def begin(cluster: ProxiedCluster, fault: Fault, victim: RoleProcess) -> None:
    if fault is Fault.KILL:
        victim.kill()
        victim.start()
    elif fault is Fault.STOP:
        victim.signal(signal.SIGSTOP)
    elif fault is Fault.TERM:
        victim.signal(signal.SIGTERM)
    else:
        for proxy in cluster.proxies.values():  # what comes to it and what it sends to others
            pid = None if proxy is cluster.proxy(victim) else victim.pid
            if fault is Fault.CUT:
                proxy.cut(pid)
            else:
                proxy.throttle(SLOW_BYTES_PER_S, pid)


async def end(cluster: ProxiedCluster, fault: Fault, victim: RoleProcess, under_way: Flight) -> int | None:
    """The fault is over, the role is there again; its exit code if it drained."""
    exit_code = None
    cluster.heal()
    if fault is Fault.KILL:
        await asyncio.to_thread(victim.wait_ready)
    elif fault is Fault.STOP:
        victim.signal(signal.SIGCONT)
    elif fault is Fault.TERM:
        exit_code = await asyncio.to_thread(victim.wait)
        await asyncio.to_thread(victim.restart)
    return exit_code


async def until_well(cluster: ProxiedCluster, seeds: Iterator[int]) -> None:
    """Every role is there, holds nothing and is trusted: what failed in the run before is asked last until one request
    at a time has shown that it serves, and this run's would all go elsewhere."""
    await until_quiet(cluster)
    async with AsyncClient(cluster.address) as client, asyncio.timeout(WELL_WITHIN_S):
        while await asyncio.to_thread(cluster.coordinator.metric, "kvrelay_circuits_open"):
            await asyncio.gather(*(ask(client, make_prompt(PROMPT_TOKENS, next(seeds)), WARM_UP) for _ in range(4)))
        await wait_until_quiet(client, NUM_NODES)


async def until_quiet(cluster: ProxiedCluster) -> None:
    """Every role is there, and holds nothing."""
    async with AsyncClient(cluster.address) as client:
        async with asyncio.timeout(WELL_WITHIN_S):
            while not await answers(client):
                await asyncio.sleep(0.05)
        await wait_until_quiet(client, NUM_NODES)


async def answers(client: AsyncClient) -> bool:
    try:
        await client.status()
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.value)
def test_cell(run: Run, stage: Stage, reference: Reference) -> None:
    requests = [request for request in run.requests if request.stage is stage]
    assert requests
    for request in requests:
        assert request.ended_at, f"{request}: not over"
        after_s = request.ended_at - run.faulted_at
        if run.role == "coordinator" and request.error is not None:
            check_unavailable(run, request, after_s)
        else:
            check_answer(run, request, after_s, reference)


def check_unavailable(run: Run, request: InFlight, after_s: float) -> None:
    refused = run.fault is Fault.TERM and request.stage is Stage.BEFORE_RESERVE
    assert run.ends_clients or refused, f"{request}: {request.error!r}"
    assert isinstance(request.error, UnavailableError), f"{request}: {request.error!r}"
    assert request.error.retryable
    assert after_s < UNAVAILABLE_BOUND_S, f"{request}: told after {after_s:.1f} s"


def check_answer(run: Run, request: InFlight, after_s: float, reference: Reference) -> None:
    assert request.error is None, f"{request}: {request.error!r}"
    assert request.finished is not None
    assert request.token_ids == request.expected(reference), str(request)
    usage = request.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt_ids), request.sampling.max_tokens)
    assert usage.cached.total < len(request.prompt_ids)
    assert request.finished.retries <= most_retries(run), f"{request}: {request.finished.retries} retries"
    assert after_s < (SLOW_BOUND_S if run.fault is Fault.SLOW else BOUND_S), f"{request}: ended after {after_s:.1f} s"


def most_retries(run: Run) -> int:
    if run.role not in ("prefill", "decode") or run.fault not in HURTS:
        return 0
    return 2


def test_those_that_it_concerned_were_retried(run: Run) -> None:
    """Without this, requests may have been elsewhere, and the cells above prove nothing."""
    if run.role not in ("prefill", "decode") or run.fault not in HURTS:
        return
    stages = [Stage.BEFORE_FIRST_FRAME, Stage.MID_STREAM, Stage.BEFORE_COMMIT]
    stages += [Stage.MID_DECODE] if run.role == "decode" else []
    for stage in stages:
        retries = [it.finished.retries for it in run.requests if it.stage is stage and it.finished]
        assert sum(retries) > 0, stage


def test_nothing_is_held_and_the_role_is_back(run: Run) -> None:
    """`strike` waited until every pool is free or cached and every node ready."""
    assert run.exit_code == (0 if run.fault is Fault.TERM else None)


def test_both_kinds_of_request_were_at_every_stage(run: Run) -> None:
    for stage in Stage:
        kinds = {request.sampling.greedy for request in run.requests if request.stage is stage}
        assert kinds == {True, False}, stage


assert len(set(itertools.product(ROLES, Fault))) == len(CASES)
