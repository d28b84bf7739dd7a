"""One link at a time: between two processes it breaks, goes silent or corrupts, and all others are well.

Real processes, a tiny random model, two nodes of each kind, every link through a fault proxy.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.kv.frame import FrameKind
from kvrelay.sampling import SamplingParams
from tests.support import golden
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import RoleProcess, running
from tests.support.fault_proxy import FaultProxy
from tests.support.in_flight import (
    HELD_BEFORE,
    IN_CHUNKS,
    PROMPT_TOKENS,
    InFlight,
    Reference,
    Stage,
    flight,
    make_prompt,
)
from tests.support.link_faults import Direction
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.stored import until_stored

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_NODES = 4
FOUND_WITHIN_S = 30.0  # by keepalive, after 4 on a quiet machine; with gRPC's own ping timeout after 60
PATIENT_S = 120  # of both
BOUND_S = 40.0
MEMBER_TIMEOUT_S = 30
SILENT_S = 6.0  # longer than keepalive bears, shorter than a member is waited for

seeds = itertools.count(900_000)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    directory = tmp_path_factory.mktemp("links")
    shape = ProxiedCluster(
        model,
        directory,
        num_prefill=2,
        num_decode=2,
        num_blocks=256,
        coordinator_args=["--member-timeout-s", f"{MEMBER_TIMEOUT_S}"],
        prefill_args=[*IN_CHUNKS, "--handoff-stall-s", f"{PATIENT_S}"],
        decode_args=["--lease-s", f"{PATIENT_S}"],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in "".join(role.log_path.read_text() for role in shape.roles)


@pytest.fixture
async def client(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        cluster.heal()
        await wait_until_quiet(client, NUM_NODES)


@dataclass
class Handoff:
    """A request whose KV stream stands still between two nodes."""

    request: InFlight
    prefill: RoleProcess
    decode: RoleProcess
    proxy: FaultProxy
    release: Callable[[], None]


@asynccontextmanager
async def handoff(cluster: ProxiedCluster, client: AsyncClient, stage: Stage) -> AsyncIterator[Handoff]:
    """One request, held at a stage of its KV stream."""
    async with flight(cluster, cluster.coordinator, next(seeds) * 10) as under_way:
        stream = await under_way.launch_held_one(stage)
        prefill, decode = stream.ends
        yield Handoff(under_way.requests[0], prefill, decode, cluster.proxy(decode), stream.hold.release)


async def right_answer(request: InFlight, reference: Reference, *, retries: int, bound_s: float = BOUND_S) -> None:
    assert request.task is not None
    async with asyncio.timeout(bound_s):
        await request.task
    assert request.error is None
    assert request.finished is not None
    assert request.token_ids == request.expected(reference)
    assert request.finished.retries == retries
    usage = request.finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt_ids), len(request.token_ids))


def total(nodes: list[RoleProcess], name: str, **labels: str) -> float:
    return sum(node.metric(name, **labels) for node in nodes)


# Corruption


@pytest.mark.parametrize(
    "kind", [FrameKind.BEGIN, FrameKind.BLOCK, FrameKind.TAIL, FrameKind.END], ids=lambda it: it.name
)
async def test_a_frame_that_is_corrupt_on_the_wire_is_refused_counted_and_sent_again(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, kind: FrameKind
) -> None:
    counted = total(cluster.decode, "kvrelay_handoffs_refused_total", code="corrupt_block")
    for node in cluster.decode:
        cluster.proxy(node).corrupt(kind)
    async with flight(cluster, cluster.coordinator, next(seeds) * 10) as under_way:
        under_way.launch(Stage.MID_STREAM)
        await right_answer(under_way.requests[0], reference, retries=1 if kind else 0)
    assert total(cluster.decode, "kvrelay_handoffs_refused_total", code="corrupt_block") == counted + 1


async def test_a_block_that_the_store_sends_corrupt_is_counted_and_computed(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference
) -> None:
    store, prompt_ids = cluster.store, make_prompt(PROMPT_TOKENS, next(seeds))
    assert store is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, seed=1)
    first = InFlight(Stage.AT_END, prompt_ids, sampling).start(client)
    await right_answer(first, reference, retries=0)
    assert first.finished is not None
    await until_stored(store, first.finished)
    nodes = [*cluster.prefill, *cluster.decode]  # what they cache themselves they would not ask the store for
    await asyncio.gather(*(asyncio.to_thread(node.stop) for node in nodes))
    await asyncio.gather(*(asyncio.to_thread(node.restart) for node in nodes))
    await wait_until_quiet(client, NUM_NODES)
    cluster.proxy(store).corrupt(direction=Direction.TO_CLIENT)
    again = InFlight(Stage.AT_END, prompt_ids, sampling).start(client)
    await right_answer(again, reference, retries=0)
    assert total(cluster.prefill, "kvrelay_store_corrupt_total") == 1


@pytest.mark.parametrize("stage", HELD_BEFORE, ids=lambda stage: stage.value)
async def test_http2_that_is_corrupt_costs_only_time(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, stage: Stage
) -> None:
    async with handoff(cluster, client, stage) as held:
        held.proxy.corrupt_raw(pid=held.prefill.pid)
        held.release()
        assert held.request.task is not None
        await asyncio.wait([held.request.task], timeout=BOUND_S)
        assert held.request.finished is not None, held.request.error
        await right_answer(held.request, reference, retries=held.request.finished.retries)
        assert held.request.finished.retries <= 2


# A pair of nodes that cannot reach each other, while the coordinator reaches both


@pytest.mark.parametrize("stage", HELD_BEFORE, ids=lambda stage: stage.value)
async def test_the_link_of_a_pair_breaks(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, stage: Stage
) -> None:
    async with handoff(cluster, client, stage) as held:
        held.proxy.cut(held.prefill.pid)
        await right_answer(held.request, reference, retries=1)
        assert held.request.finished is not None
        assert held.request.finished.prefill_node != held.prefill.address


async def test_the_link_of_a_pair_goes_silent(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference
) -> None:
    async with handoff(cluster, client, Stage.MID_STREAM) as held:
        held.proxy.pause(held.prefill.pid)
        held.release()
        started = time.monotonic()
        await right_answer(held.request, reference, retries=1)
        assert held.request.ended_at - started < FOUND_WITHIN_S


async def test_the_word_that_a_handoff_was_committed_is_lost(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference
) -> None:
    """It stands all the same: the answer goes on, nothing is retried or counted twice."""
    async with handoff(cluster, client, Stage.BEFORE_COMMIT) as held:
        lost = held.proxy.hold_reply(lambda head: head[2:4] == b"\x10\x01", pid=held.prefill.pid)  # committed is set
        held.release()
        await lost.reached()
        held.proxy.cut(held.prefill.pid)
        await right_answer(held.request, reference, retries=0)


# A node that says it is well, and cannot be reached


@pytest.mark.parametrize("stage", HELD_BEFORE, ids=lambda stage: stage.value)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_the_coordinator_does_not_reach_a_node_whose_join_stream_lives(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference, stage: Stage, kind: str
) -> None:
    async with handoff(cluster, client, stage) as held:
        node = held.prefill if kind == "prefill" else held.decode
        cluster.proxy(node).cut(cluster.coordinator.pid)
        await right_answer(held.request, reference, retries=1)
        later = InFlight(Stage.BEFORE_RESERVE, make_prompt(PROMPT_TOKENS, next(seeds)), held.request.sampling)
        later.start(client)
        assert later.task is not None
        await asyncio.wait([later.task], timeout=BOUND_S)
        assert later.finished is not None, later.error
        await right_answer(later, reference, retries=later.finished.retries)


# A node's own link to the coordinator


async def test_a_node_whose_join_stream_breaks_goes_on_with_its_work(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference
) -> None:
    async with handoff(cluster, client, Stage.MID_STREAM) as held:
        for node in (held.decode, held.prefill):
            cluster.proxy(cluster.coordinator).reset(node.pid)
        held.release()
        await right_answer(held.request, reference, retries=0)


async def test_a_node_that_the_coordinator_does_not_hear_for_6_s_goes_on_with_its_work_and_is_trusted_after(
    cluster: ProxiedCluster, client: AsyncClient, reference: Reference
) -> None:
    async with handoff(cluster, client, Stage.MID_STREAM) as held:
        before = {report.info.instance_id for report in (await client.status()).nodes}
        num_open = cluster.coordinator.metric("kvrelay_circuits_open")  # earlier tests broke other links
        for node in (held.decode, held.prefill):
            cluster.proxy(cluster.coordinator).pause(node.pid)
        silent_until = time.monotonic() + SILENT_S
        held.release()
        await right_answer(held.request, reference, retries=0)
        meanwhile = InFlight(Stage.BEFORE_RESERVE, make_prompt(PROMPT_TOKENS, next(seeds)), held.request.sampling)
        await right_answer(meanwhile.start(client), reference, retries=0)
        await asyncio.sleep(silent_until - time.monotonic())
        cluster.heal()
    await wait_until_quiet(client, NUM_NODES)
    assert {report.info.instance_id for report in (await client.status()).nodes} == before
    assert cluster.coordinator.metric("kvrelay_circuits_open") <= num_open
    async with flight(cluster, held.decode, next(seeds) * 10) as under_way:
        await under_way.launch_held(Stage.BEFORE_COMMIT)
        under_way.release(of_victim=True)
        for request in under_way.requests:
            await right_answer(request, reference, retries=0)


# Slow links


async def test_the_real_model_over_a_link_of_1_mb_a_second(demo_model: Path, tmp_path: Path) -> None:
    """Every node behind 1 MB/s, three requests at once: a handoff takes seconds, its answer is right, and nobody is
    taken for dead."""
    cases = [case for case in golden.load() if case.name in ("unicode_mixed", "unicode_emoji", "chat_code")]
    with running(ProxiedCluster(demo_model, tmp_path)) as cluster:
        async with AsyncClient(cluster.address) as client:
            for role in (*cluster.prefill, *cluster.decode, cluster.store, cluster.coordinator):
                assert role is not None
                cluster.proxy(role).throttle(1_000_000)
            answers = await asyncio.gather(*(ask(client, case.prompt_ids) for case in cases))
            for case, answer in zip(cases, answers, strict=True):
                assert answer.token_ids == case.output_ids, case.name
                assert answer.finished.retries == 0, case.name
                assert answer.finished.handoff_bytes > 2_000_000  # three slabs: two seconds and more
            await wait_until_quiet(client, 2)
        logs = cluster.logs()
    assert "was silent" not in logs
    assert "is lost" not in logs
