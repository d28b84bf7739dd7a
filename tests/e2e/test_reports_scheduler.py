"""What users of other servers reported about schedulers and admission, on real processes and a tiny model.

Each test names its source. What else such reports led to is listed in docs/reliability.md.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.admission import MAX_TRYING
from kvrelay.client import AsyncClient
from kvrelay.errors import DeadlineError, KVRelayError, NeverFitsError, OverloadedError, PromptTooLongError
from kvrelay.inference import TokenPrompt, TokensGenerated
from kvrelay.rpc.channel import open_channel
from tests.support.answers import Answer, ask, collect, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.stored import until_stored
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_requests import (
    answer_or_error,
    ask_and_leave,
    ask_until_served,
    expected,
    greedy,
    random_prompt,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MAX_MODEL_LEN = 900
NUM_BLOCKS = 64  # 1,024 tokens: whatever the model takes fits
CHUNK_TOKENS = 64
MAX_QUEUE = 32
BURST_TOKENS = 60  # so many that 200 requests come sooner than they can be served
NUM_NODES = 2  # that compute


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = Cluster(
        model,
        tmp_path_factory.mktemp("cluster"),
        num_blocks=NUM_BLOCKS,
        coordinator_args=["--max-queue", str(MAX_QUEUE)],
        prefill_args=[
            *("--chunk-tokens", str(CHUNK_TOKENS), "--max-batched-tokens", str(CHUNK_TOKENS)),
            *("--prefix-load", "always"),  # the tiny model would compute meanwhile
        ],
        decode_args=["--lease-s", "5"],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128, 129, 639, 640, 641, MAX_MODEL_LEN - 1])
async def test_prompts_at_the_edges_of_chunks_and_of_the_models_length(
    client: AsyncClient, reference: ReferenceEngine, num_tokens: int
) -> None:
    """Blaizzy/mlx-vlm#1603, vllm#765: a prompt that took several steps, or just passed an internal limit, hung."""
    prompt_ids = random_prompt(num_tokens, seed=num_tokens)
    num_answered = min(2, MAX_MODEL_LEN - num_tokens)
    answer = await ask(client, prompt_ids, greedy(num_answered))
    assert answer.token_ids == expected(reference, prompt_ids, num_answered)
    assert answer.finished.usage.prompt_tokens == num_tokens


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(MAX_MODEL_LEN, 1), (MAX_MODEL_LEN + 1, 1), (899, 2)])
async def test_what_is_longer_than_the_model_is_refused_at_once_with_both_numbers(
    client: AsyncClient, num_tokens: int, max_tokens: int
) -> None:
    """vllm#276: left in the queue, with a line in the log only."""
    async with asyncio.timeout(20.0):  # of the 60 that one may wait in the queue
        with pytest.raises(PromptTooLongError) as refused:
            await ask(client, random_prompt(num_tokens, 1), greedy(max_tokens))
    assert str(num_tokens) in refused.value.message
    assert str(MAX_MODEL_LEN) in refused.value.message


async def test_a_burst_is_refused_beyond_the_queue_and_health_answers_all_the_while(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """vllm#18826, vllm#41250, text-generation-inference#439: an unbounded queue, or overload told as a server error."""
    rejected = cluster.coordinator.metric("kvrelay_errors_total", code=OverloadedError.code)
    num_queued, worst_health_s = 0, 0.0
    prompts = [random_prompt(40, 6000 + number) for number in range(200)]
    asking = [asyncio.create_task(answer_or_error(client, prompt_ids, BURST_TOKENS)) for prompt_ids in prompts]
    while not all(task.done() for task in asking):
        worst_health_s = max(worst_health_s, await health_takes_s(cluster))
        num_queued = max(num_queued, (await client.status()).num_queued)
    outcomes = await asyncio.gather(*asking)
    refused = [outcome for outcome in outcomes if isinstance(outcome, KVRelayError)]
    assert all(isinstance(error, OverloadedError) and error.retry_after_s > 0 for error in refused)
    assert cluster.coordinator.metric("kvrelay_errors_total", code=OverloadedError.code) - rejected == len(refused) > 0
    # Those that were let try and found every prefill node busy come back to the front, whoever came meanwhile.
    assert num_queued <= MAX_QUEUE + MAX_TRYING
    assert 200 - len(refused) >= MAX_QUEUE
    assert worst_health_s < 5.0  # on cores that the whole burst and every role share
    for prompt_ids, outcome in zip(prompts, outcomes, strict=True):
        assert isinstance(outcome, OverloadedError) or outcome_ids(outcome) == expected(
            reference, prompt_ids, BURST_TOKENS
        )


def outcome_ids(outcome: Answer | KVRelayError) -> tuple[int, ...]:
    assert isinstance(outcome, Answer)
    return outcome.token_ids


async def health_takes_s(cluster: Cluster) -> float:
    started = time.monotonic()
    async with open_channel(cluster.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30.0)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    return time.monotonic() - started


async def test_a_request_that_needs_most_of_the_pool_hides_nobody_who_holds_blocks(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """vllm#57841, vllm#40968: nothing ran for half an hour, since the head of the queue waited for blocks that one
    behind it held. Here the head needs 50 of 64 blocks while the other loads 30 from the store."""
    stored = random_prompt(480, 9000)
    assert cluster.store is not None
    first = await ask(client, stored, greedy(2))
    await until_stored(cluster.store, first.finished)
    for number in range(3):  # evicts it from both pools
        await ask(client, random_prompt(880, 9100 + number), greedy(2))
    head = random_prompt(795, 9200)
    async with asyncio.timeout(60.0):
        answers = await asyncio.gather(
            *(ask(client, prompt_ids, greedy(4)) for prompt_ids in (head, stored, random_prompt(300, 9300), stored))
        )
    assert answers[0].token_ids == expected(reference, head, 4)
    assert answers[1].token_ids == answers[3].token_ids == expected(reference, stored, 4)
    cached = answers[1].finished.usage.cached
    assert cached.memory + cached.disk >= 464, "it came from the store"


async def test_any_mixture_of_endings_leaves_room_for_a_request_of_nearly_the_whole_pool(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """vllm-metal#479: usage 0 %, nothing running, six waiting for an hour, since a stall kept part of a budget."""
    whole = random_prompt(890, 10_000)  # 56 of 64 blocks, and the most that the model takes
    for cycle in range(8):
        await asyncio.gather(
            ask(client, random_prompt(100, 10_100 + cycle), greedy(20)),
            ask_and_leave(client, random_prompt(400, 10_200 + cycle), 400, after_s=0.02 * cycle),
            out_of_time(client, random_prompt(300, 10_300 + cycle)),
            never_fits(client),
        )
        if cycle == 5:
            crash = asyncio.create_task(answer_or_error(client, random_prompt(400, 10_400), 60))
            await asyncio.to_thread(cluster.prefill[0].kill)
            await asyncio.to_thread(cluster.prefill[0].restart)
            await crash
            async with asyncio.timeout(60.0):
                await ask_until_served(client, random_prompt(20, 10_500), 2)
        await wait_until_quiet(client, NUM_NODES)
    answer = await ask(client, whole, greedy(10))
    assert answer.finished.timing.queue_s < 5.0
    assert answer.token_ids == expected(reference, whole, 10)


async def out_of_time(client: AsyncClient, prompt_ids: tuple[int, ...]) -> None:
    with pytest.raises(DeadlineError):
        await collect(client.generate(TokenPrompt(prompt_ids), greedy(600), timeout_s=0.05))


async def never_fits(client: AsyncClient) -> None:
    with pytest.raises((PromptTooLongError, NeverFitsError)):
        await ask(client, random_prompt(899, 1), greedy(200))


# A model that takes its time, so that a long prompt's prefill can be told from a token's


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {"hidden_size": 256, "num_layers": 8, "num_heads": 8, "head_dim": 32, "intermediate_size": 2048}
    return make_tiny_model(tmp_path_factory.mktemp("slow"), **size)


@pytest.fixture(scope="module")
def slow_cluster(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    chunks = ["--chunk-tokens", "64", "--max-batched-tokens", "64"]
    shape = Cluster(slow_model, tmp_path_factory.mktemp("slow"), num_blocks=256, with_store=False, prefill_args=chunks)
    with running(shape) as started:
        yield started


async def first_token_s(client: AsyncClient, prompt_ids: tuple[int, ...]) -> float:
    return (await ask(client, prompt_ids, greedy(2))).finished.timing.first_token_s


@pytest.mark.alone
async def test_long_prompts_do_not_set_the_first_token_time_of_short_ones(slow_cluster: Cluster) -> None:
    """sglang#34554, vllm#10774, vllm#57413: one account's long prompts kept everyone's first token waiting. Medians are
    compared with each other, so that a busy machine, which slows both, changes nothing."""
    async with AsyncClient(slow_cluster.address) as client:
        alone = await first_token_s(client, random_prompt(850, 20_000))
        stop = asyncio.Event()

        async def long_ones(worker: int) -> list[float]:
            times: list[float] = []
            while not stop.is_set():
                times.append(await first_token_s(client, random_prompt(850, 20_100 + 100 * worker + len(times))))
            return times

        workers = [asyncio.create_task(long_ones(worker)) for worker in range(2)]
        short = [await first_token_s(client, random_prompt(60, 20_500 + number)) for number in range(12)]
        stop.set()
        long = [seconds for times in await asyncio.gather(*workers) for seconds in times]
        assert median(short) < median(long) / 2
        assert median(long) < 2 * (2 * alone) + 1.0, "two at once, and the short ones take their share of little"
        await wait_until_quiet(client, NUM_NODES)


@pytest.mark.alone
async def test_streams_go_on_while_a_long_prompt_is_computed(slow_cluster: Cluster) -> None:
    """vllm#1026, vllm-tt-plugin#109: every stream paused for seconds while somebody's long prompt was computed."""
    async with AsyncClient(slow_cluster.address) as client:
        arrivals: list[list[float]] = [[] for _ in range(4)]
        begun = asyncio.Event()

        async def stream(number: int) -> None:
            prompt = TokenPrompt(random_prompt(60, 21_000 + number))
            async for event in client.generate(prompt, greedy(400), timeout_s=60.0):
                if isinstance(event, TokensGenerated):
                    arrivals[number].append(time.monotonic())
                    if len(arrivals[number]) == 50:
                        begun.set()

        streams = [asyncio.create_task(stream(number)) for number in range(4)]
        await begun.wait()
        sent = time.monotonic()
        took = await first_token_s(client, random_prompt(850, 21_100))
        for times in arrivals:
            during = [at for at in times if sent <= at <= sent + took]
            assert len(during) >= 5, f"{len(during)} tokens in {took:.2f} s"
            assert max(after - before for before, after in itertools.pairwise(during)) < took / 2
        await asyncio.gather(*streams)
        await wait_until_quiet(client, NUM_NODES)
