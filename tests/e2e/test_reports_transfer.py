"""What users of other servers reported about the way of KV from prefill to decode, on real processes and a tiny model.

The link from the prefill node to the decode node runs through a proxy that can hold, pause, slow or cut it. Each test
names its source. What dies at which stage of a request is in test_failures_*.py; what else such reports led to is
listed in docs/reliability.md. KVRELAY_SOAK=10 repeats as often as the reports ask for.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import KVRelayError, NeverFitsError
from kvrelay.inference import GenerateRequest, TokenPrompt
from kvrelay.kv.frame import FrameKind
from kvrelay.limits import DecodeLimits
from kvrelay.pb import inference_pb2_grpc
from kvrelay.rpc import convert_inference
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.types import Role
from tests.support.answers import Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running
from tests.support.fault_proxy import FaultProxy
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S, scaled
from tests.support.tiny_requests import (
    answer_or_error,
    ask_until_served,
    expected,
    greedy,
    leave,
    random_prompt,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

NUM_NODES = 2  # that compute
NUM_BLOCKS = 64
CHUNK_BLOCKS = 4
LEASE_S = 2.0
STALL_S = 3.0
WAIT_S = 60.0  # for what comes in less than a second on a quiet machine
FREED_S = 30.0  # LEASE_S and less there; not within minutes, or never, where something keeps them


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    shape = ProxiedCluster(
        model,
        tmp_path_factory.mktemp("cluster"),
        num_blocks=NUM_BLOCKS,
        with_store=False,
        prefill_args=["--chunk-tokens", str(16 * CHUNK_BLOCKS), "--handoff-stall-s", str(STALL_S)],
        decode_args=["--lease-s", str(LEASE_S)],
    )
    with running(shape) as started:
        assert isinstance(started, ProxiedCluster)
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: ProxiedCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.direct_addresses[0]) as client:
        await wait_until_quiet(client, NUM_NODES)  # a test before may have restarted a node
        yield client
        await asyncio.to_thread(cluster.heal)
        await wait_until_quiet(client, NUM_NODES)


@pytest.fixture
def link(cluster: ProxiedCluster) -> FaultProxy:
    """What everybody's calls to the decode node go through."""
    return cluster.proxy(cluster.decode[0])


def pid_of(role: RoleProcess) -> int:
    assert role.process is not None
    return role.process.pid


def num_held(role: RoleProcess) -> float:
    """Blocks that are neither free nor merely cached."""
    return role.metric("kvrelay_kv_blocks", state="held") + role.metric("kvrelay_kv_blocks", state="reserved")


async def frees_all(role: RoleProcess) -> None:
    await wait_until(lambda: num_held(role) == 0, FREED_S, f"{role.role} holds no block")


def num_generated(cluster: Cluster) -> float:
    return cluster.coordinator.metric("kvrelay_generation_tokens_total")


def start(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> asyncio.Task[Answer]:
    return asyncio.create_task(ask(client, prompt_ids, greedy(max_tokens)))


# A prefill that ends in its midst


async def test_a_prefill_that_gives_up_in_its_midst_never_becomes_an_answer(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """sglang#30233: the decode node began from whatever part of the KV had come, and answered with fluent nonsense."""
    before = num_generated(cluster)
    hold = link.hold(FrameKind.BLOCK, 2 * CHUNK_BLOCKS + 1)
    asking = asyncio.create_task(answer_or_error(client, random_prompt(700, 100), 20))
    await hold.reached()
    await asyncio.to_thread(cluster.prefill[0].kill)
    outcome = await asking
    assert isinstance(outcome, KVRelayError)
    assert outcome.retryable
    assert num_generated(cluster) == before
    await frees_all(cluster.decode[0])
    await asyncio.to_thread(cluster.prefill[0].restart)
    assert (await ask_until_served(client, random_prompt(700, 101), 4)).token_ids == expected(
        reference, random_prompt(700, 101), 4
    )


async def test_a_client_that_leaves_while_its_prefill_node_is_dead_strands_no_block(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """vllm#46283: only word of the prefill node gave the blocks of an aborted load back, and it had crashed."""
    for number in range(scaled(2)):
        prefill = cluster.prefill[0]
        link.pause(pid_of(prefill))
        asking = start(client, random_prompt(400, 200 + number), 20)
        await wait_until(lambda: num_held(cluster.decode[0]) > 0, WAIT_S, "the decode node has reserved")
        await leave(asking)
        await asyncio.to_thread(prefill.kill)
        await frees_all(cluster.decode[0])
        await asyncio.to_thread(prefill.restart)
        link.heal()
        await wait_until_quiet(client, NUM_NODES)
    prompt_ids = random_prompt(400, 299)
    answer = await ask_until_served(client, prompt_ids, 8)
    assert answer.token_ids == expected(reference, prompt_ids, 8)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 40])
async def test_a_prefill_node_that_restarts_on_its_address_is_a_new_one(
    cluster: ProxiedCluster, client: AsyncClient, reference: ReferenceEngine, num_blocks: int
) -> None:
    """vllm#49238, llm-d#2187: what was remembered of the old process, by its address, crashed the decode node or was
    used for up to an hour. The second time its pool has another size, which a request must fit."""
    decode_pid, (before,) = pid_of(cluster.decode[0]), await prefill_instances(client)
    for number in range(3):
        await ask(client, random_prompt(100, 300 + number), greedy(4))
    prefill = cluster.prefill[0]
    await asyncio.to_thread(prefill.kill)
    at = prefill.args.index("--num-blocks") + 1
    prefill.args[at] = str(num_blocks)
    await asyncio.to_thread(prefill.restart)
    await ask_until_served(client, random_prompt(100, 310), 4)
    async with asyncio.timeout(WAIT_S):
        for number in range(5):
            prompt_ids = random_prompt(200, 320 + number)
            assert (await ask(client, prompt_ids, greedy(8))).token_ids == expected(reference, prompt_ids, 8)
    assert pid_of(cluster.decode[0]) == decode_pid
    (after,) = await prefill_instances(client)
    assert after != before
    if num_blocks < NUM_BLOCKS:
        generated = num_generated(cluster)
        with pytest.raises(NeverFitsError, match="prefill node has 40"):
            await ask(client, random_prompt(700, 330), greedy(20))
        assert num_generated(cluster) == generated
        prefill.args[at] = str(NUM_BLOCKS)
        await asyncio.to_thread(prefill.stop)
        await asyncio.to_thread(prefill.restart)
        await ask_until_served(client, random_prompt(100, 340), 4)


async def prefill_instances(client: AsyncClient) -> list[str]:
    nodes = (await client.status()).nodes
    return [node.info.instance_id for node in nodes if node.info.role is Role.PREFILL_NODE]


# Clients that leave at the worst moment


async def test_blocks_of_a_cancelled_handoff_are_not_written_by_it_once_another_request_has_them(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """sglang#35049, sglang#24580, sglang#32564: late writes of an aborted transfer went into the next request's blocks.
    Two prompts of 480 tokens do not fit side by side, so the second takes the blocks of the first."""
    link.throttle(1_000_000, pid_of(cluster.prefill[0]))
    for number in range(scaled(10)):
        blocks = link.num_kv_frames.total()
        asking = start(client, random_prompt(560, 400 + number), 60)
        await wait_until(lambda seen=blocks: link.num_kv_frames.total() > seen + 3, WAIT_S, "KV has come")  # type: ignore[misc]
        await leave(asking)
        prompt_ids = random_prompt(560, 500 + number)
        answer = await ask(client, prompt_ids, greedy(8))
        assert answer.token_ids == expected(reference, prompt_ids, 8), number


async def test_leaving_after_any_chunk_gives_every_block_back(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """sglang#36926: one chunk a cancel was neither cached nor freed. Sent again, it finds full blocks at most."""
    for chunk in range(1, 9):
        for number in range(scaled(1)):
            prompt_ids = random_prompt(500, 600 + 10 * chunk + number)
            hold = link.hold(FrameKind.BLOCK, CHUNK_BLOCKS * (chunk - 1) + 1)
            asking = start(client, prompt_ids, 20)
            await hold.reached()
            await leave(asking)
            hold.release()
            await wait_until_quiet(client, NUM_NODES)
            again = await ask(client, prompt_ids, greedy(4))
            assert again.token_ids == expected(reference, prompt_ids, 4), chunk
            assert again.finished.usage.cached.total <= 496
            assert again.finished.usage.cached.total % 16 == 0


async def test_leaving_between_the_prefill_and_the_first_token_frees_both_nodes(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy
) -> None:
    """llm-d#1138, TensorRT-LLM#7575: the decode node had never heard of the request, so nobody told the prefill node to
    free its blocks. Here the decode node stands still before it has seen the handoff's end."""
    decode = cluster.decode[0]
    before = decode.metric("kvrelay_decode_tokens_generated_total")
    hold = link.hold(FrameKind.END)
    asking = start(client, random_prompt(400, 700), 100)
    await hold.reached()
    decode.signal(signal.SIGSTOP)
    try:
        await leave(asking)
        await frees_all(cluster.prefill[0])
    finally:
        decode.signal(signal.SIGCONT)
        hold.release()
    await frees_all(decode)
    assert decode.metric("kvrelay_decode_tokens_generated_total") == before


async def test_nodes_free_everything_when_a_coordinator_stands_still_and_its_client_has_gone(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy
) -> None:
    """The same reports' other form: whoever should pass the cancel on does not."""
    hold = link.hold(FrameKind.END)
    async with AsyncClient(cluster.direct_addresses[0]) as leaving:
        asking = start(leaving, random_prompt(400, 710), 600)
        await hold.reached()
        cluster.coordinator.signal(signal.SIGSTOP)
        hold.release()
        await leave(asking)
    try:
        for node in (cluster.prefill[0], cluster.decode[0]):
            await frees_all(node)
    finally:
        cluster.coordinator.signal(signal.SIGCONT)


# Links that stand still


async def test_a_prefill_pool_full_of_left_requests_is_freed_though_nothing_new_comes(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """TensorRT-LLM#12313, TensorRT-LLM#12314: timed-out transfers were reaped only when a prefill was scheduled, which
    a full pool never did."""
    prefill = cluster.prefill[0]
    link.pause(pid_of(prefill))
    asking = [start(client, random_prompt(200, 800 + number), 4) for number in range(5)]
    await wait_until(lambda: num_held(prefill) >= 13 * 4, WAIT_S, "prompts fill the pool")
    await leave(*asking)
    await frees_all(prefill)
    await frees_all(cluster.decode[0])
    link.heal()
    for burst in range(scaled(2)):
        crowd = [start(client, random_prompt(200, 900 + 30 * burst + number), 100) for number in range(30)]
        await wait_until(lambda: num_held(prefill) > 0, WAIT_S, "they run")
        await leave(*crowd)
    await wait_until_quiet(client, NUM_NODES)
    prompt_ids = random_prompt(200, 990)
    assert (await ask(client, prompt_ids, greedy(8))).token_ids == expected(reference, prompt_ids, 8)


async def test_a_transfer_that_stands_still_from_its_first_block_is_given_up_and_repeated(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """TensorRT-LLM#15727: the clock started at the last chunk, so nothing ended a hang at the first. The connection
    stays open and answers pings here, so only the transfer's own clock can tell."""
    prompt_ids = random_prompt(800, 1000)
    link.hold(FrameKind.BLOCK, 1)
    started = time.monotonic()
    answer = await ask(client, prompt_ids, greedy(8))
    assert STALL_S <= time.monotonic() - started < 10 * STALL_S
    assert answer.finished.retries == 1
    assert answer.token_ids == expected(reference, prompt_ids, 8)


async def test_a_decode_node_that_dies_in_transfers_frees_the_prefill_nodes_blocks(
    cluster: ProxiedCluster, client: AsyncClient, link: FaultProxy, reference: ReferenceEngine
) -> None:
    """vllm#38027, vllm#41383: they were kept by an eight-minute timer, and new requests saw a tiny cache."""
    prompts = [random_prompt(300, 1100 + number) for number in range(3)]
    holds = [link.hold(FrameKind.BLOCK, 5) for _ in prompts]
    asking = [asyncio.create_task(answer_or_error(client, prompt_ids, 8)) for prompt_ids in prompts]
    for hold in holds:
        await hold.reached()
    await asyncio.to_thread(cluster.decode[0].kill)
    await frees_all(cluster.prefill[0])
    await asyncio.to_thread(cluster.decode[0].restart)
    await asyncio.gather(*asking)
    for prompt_ids in prompts:
        answer = await ask_until_served(client, prompt_ids, 8)
        assert answer.token_ids == expected(reference, prompt_ids, 8)


# Leases


@asynccontextmanager
async def one_row(cluster: ProxiedCluster) -> AsyncIterator[None]:
    """Inside, the decode node runs one sequence at a time, and admits more than it could hold at their longest."""
    usual = DecodeLimits(max_batch=64, max_batched_tokens=512)
    async with open_channel(cluster.decode[0].address) as channel:
        await DecodeClient(channel).set_limits(replace(usual, max_batch=1, reserve_output_tokens=16))
        try:
            yield
        finally:
            await DecodeClient(channel).set_limits(usual)


async def test_requests_that_wait_in_the_decode_node_for_longer_than_a_lease_are_right(
    cluster: ProxiedCluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """vllm#21570, vllm#35764: the prefill node freed blocks by a timer while the decode node queued, which then read
    what was in them, and said 200. Here the KV was pushed and proven before; who reads the answer holds the blocks."""
    prompts = [random_prompt(60, 1200 + number) for number in range(6)]
    async with one_row(cluster):
        answers = await asyncio.gather(*(ask(client, prompt_ids, greedy(400)) for prompt_ids in prompts))
    assert max(answer.finished.timing.total_s for answer in answers) > LEASE_S
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(reference, prompt_ids, 400)


# Sizes


async def test_a_decode_node_computes_nothing_of_a_prompt_that_was_handed_over(
    cluster: ProxiedCluster, client: AsyncClient
) -> None:
    """vllm#26896: the decode worker ran the prefill again."""
    decode = cluster.decode[0]
    before = decode.metric("kvrelay_decode_tokens_computed_total")
    await ask(client, random_prompt(640, 1300), greedy(8))
    assert decode.metric("kvrelay_decode_tokens_computed_total") - before == 7, "the first token came with the KV"


async def test_a_client_with_grpcs_default_limits_gets_long_answers_with_logprobs(
    cluster: ProxiedCluster, reference: ReferenceEngine
) -> None:
    """grpc.io#1254, APPFL#164: one message grew past gRPC's default limit of 4 MiB."""
    prompt_ids = random_prompt(60, 1400)
    sampling = replace(greedy(800), logprobs=20)
    largest, token_ids = 0, list[int]()
    async with grpc.aio.insecure_channel(cluster.direct_addresses[0]) as channel:
        request = convert_inference.generate_request_to_pb(GenerateRequest(TokenPrompt(prompt_ids), sampling))
        async for event in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60.0):
            largest = max(largest, event.ByteSize())
            token_ids += event.tokens.token_ids
    assert tuple(token_ids) == expected(reference, prompt_ids, 800)
    assert largest < 2**20
