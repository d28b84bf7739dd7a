"""Real processes on a tiny random model, checked against an engine that answers alone: edges, cancels, restarts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidRequestError, KVRelayError, NeverFitsError, OverloadedError, UnavailableError
from kvrelay.messages import NodeRequest
from kvrelay.sampling import SamplingParams
from kvrelay.types import FinishReason, RequestId
from tests.support.answers import Answer, ask, wait_until_quiet
from tests.support.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from tests.support.cluster import Cluster, running
from tests.support.held_answers import ids, regex, schema
from tests.support.reference import ReferenceEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_NODES = 4
NUM_BLOCKS = 40  # of every node: 640 tokens
CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = Cluster(
        model,
        tmp_path_factory.mktemp("tiny"),
        num_prefill=2,
        num_decode=2,
        num_blocks=NUM_BLOCKS,
        coordinator_args=["--max-queue", "32"],
        prefill_args=["--chunk-tokens", str(CHUNK_TOKENS)],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


def prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(num_tokens))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def expected(reference: ReferenceEngine, prompt_ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    return tuple(reference.answer(NodeRequest(RequestId("reference"), prompt_ids, len(prompt_ids), greedy(max_tokens))))


async def ask_and_leave(client: AsyncClient, prompt_ids: tuple[int, ...], after_s: float) -> None:
    asking = asyncio.create_task(ask(client, prompt_ids, greedy(60)))
    await asyncio.wait({asking}, timeout=after_s)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def ask_until_served(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> Answer:
    """Asks again for as long as the cluster says that it is not there."""
    while True:
        with suppress(UnavailableError):
            return await ask(client, prompt_ids, greedy(max_tokens))
        await asyncio.sleep(0.1)


async def test_prompt_lengths_at_the_edges_of_blocks_and_chunks(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 635, 636):
        prompt_ids = prompt(num_tokens, seed=num_tokens)
        answer = await ask(client, prompt_ids, greedy(4))
        assert answer.token_ids == expected(reference, prompt_ids, 4), num_tokens
        assert (answer.finished.usage.prompt_tokens, answer.finished.usage.completion_tokens) == (num_tokens, 4)


async def test_the_same_prompt_again_and_longer_ones_after_it(client: AsyncClient, reference: ReferenceEngine) -> None:
    for num_tokens in (16, 32, 48, 160):
        first = prompt(num_tokens, seed=1000 + num_tokens)
        for prompt_ids in (first, first, first, first + prompt(1, 1), first + prompt(16, 2)):
            answer = await ask(client, prompt_ids, greedy(8))
            assert answer.token_ids == expected(reference, prompt_ids, 8), len(prompt_ids)
            assert answer.finished.usage.cached.total < len(prompt_ids)


async def test_hits_and_misses_in_one_batch(client: AsyncClient, reference: ReferenceEngine) -> None:
    shared = prompt(200, seed=2000)
    await ask(client, shared, greedy(1))
    prompts = [shared + prompt(20, 2001 + i) for i in range(4)] + [prompt(60, 2100 + i) for i in range(4)]
    answers = await asyncio.gather(*(ask(client, prompt_ids, greedy(24)) for prompt_ids in prompts))
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(reference, prompt_ids, 24)


async def test_a_client_that_leaves_at_any_moment_changes_nobodys_answer(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    for number in range(30):
        await ask_and_leave(client, prompt(480, 3000 + number), after_s=0.004 * number)
        prompt_ids = prompt(480, 4000 + number)  # wants the blocks that were just given back
        answer = await ask(client, prompt_ids, greedy(4))
        assert answer.token_ids == expected(reference, prompt_ids, 4), number


async def test_answers_held_to_a_schema_conform_and_are_those_of_one_engine_alone(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    """Through processes of which the coordinator has no torch."""
    spaces = dict.fromkeys(ids(" \t\n"), -100.0)
    held = schema('{"type": "array", "items": {"enum": ["a", 7, null]}, "maxItems": 4}')
    for seed in range(4):
        sampling = SamplingParams(seed=seed, max_tokens=100, structured=held, logit_bias=spaces)
        answer = await ask(client, prompt(40, 9000 + seed), sampling)
        node_request = NodeRequest(RequestId("reference"), prompt(40, 9000 + seed), 40, sampling)
        assert answer.token_ids == tuple(reference.answer(node_request))
        assert answer.finished.reason is FinishReason.STOP
        assert all(value in ("a", 7, None) for value in json.loads(answer.text))
    with pytest.raises(InvalidRequestError, match="regex is refused: invalid character class range"):
        await ask(client, prompt(20, 9100), SamplingParams(structured=regex("[z-a]")))


async def test_over_http_the_tokens_are_the_same_whole_and_streamed(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    prompt_ids = prompt(100, seed=9200)
    asked: dict[str, Any] = {
        "model": (await client.list_models())[0].name,
        "prompt": list(prompt_ids),
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True},
    }
    tokens = [f"token_id:{token_id}" for token_id in expected(reference, prompt_ids, 12)]
    async with AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as http:
        whole = await http.completions.create(**asked)
        assert whole.choices[0].logprobs.tokens == tokens
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (100, 12)
        chunks = [chunk async for chunk in await http.completions.create(**asked, stream=True)]
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for one in logprobs if one for token in one.tokens] == tokens
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_what_can_never_fit_is_refused_and_nobody_waits_behind_it(client: AsyncClient) -> None:
    small = [asyncio.create_task(ask(client, prompt(20, 5000 + i), greedy(4))) for i in range(3)]
    for num_tokens, max_tokens in ((641, 1), (640, 2), (500, 200)):
        with pytest.raises(NeverFitsError):
            await ask(client, prompt(num_tokens, 5100), greedy(max_tokens))
    await asyncio.gather(*small)
    assert len((await ask(client, prompt(636, 5200), greedy(4))).token_ids) == 4  # the whole pool


async def test_a_burst_is_answered_or_refused_with_advice(client: AsyncClient) -> None:
    async def one(number: int) -> Answer | KVRelayError:
        try:
            return await ask(client, prompt(40, 6000 + number), greedy(6))
        except OverloadedError as error:
            return error

    outcomes = await asyncio.gather(*(one(number) for number in range(200)))
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    assert len(answers) >= 32
    assert all(len(answer.token_ids) == 6 for answer in answers)
    assert all(outcome.retry_after_s > 0 for outcome in outcomes if isinstance(outcome, KVRelayError))


@pytest.mark.parametrize(("victim", "seed"), [("prefill", 7000), ("decode", 7100), ("store", 7200)])
async def test_kill_9_under_load_costs_only_time(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine, victim: str, seed: int
) -> None:
    assert cluster.store is not None
    node = {"prefill": cluster.prefill[0], "decode": cluster.decode[0], "store": cluster.store}[victim]
    prompts = [prompt(200, seed + number) for number in range(8)]
    asking = [asyncio.create_task(ask(client, prompt_ids, greedy(300))) for prompt_ids in prompts]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(node.kill)
    answers = await asyncio.gather(*asking)
    await asyncio.to_thread(node.restart)
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(reference, prompt_ids, 300)
        assert answer.finished.usage.completion_tokens == 300


async def test_requests_that_wait_when_every_decode_node_comes_back_are_served_at_once(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    running_ones = [asyncio.create_task(ask(client, prompt(100, 8000 + i), greedy(400))) for i in range(4)]
    await asyncio.sleep(0.5)
    for node in cluster.decode:
        await asyncio.to_thread(node.kill)
    for node in cluster.decode:
        node.start()
    prompts = [prompt(100, 8100 + number) for number in range(8)]
    asking = [asyncio.create_task(ask_until_served(client, prompt_ids, 8)) for prompt_ids in prompts]
    await asyncio.gather(*(asyncio.to_thread(node.wait_ready) for node in cluster.decode))
    async with asyncio.timeout(40):  # below the 60 s that a request may wait for room
        answers = await asyncio.gather(*asking)
    await asyncio.gather(*running_ones, return_exceptions=True)
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(reference, prompt_ids, 8)


async def test_every_account_adds_up(cluster: Cluster, client: AsyncClient) -> None:
    """After all of the above: as many requests ended as began, and nothing is counted as running."""
    await wait_until_quiet(client, NUM_NODES)
    metric = cluster.coordinator.metric
    ended = sum(metric("kvrelay_request_edges_total", edge=edge) for edge in ("finished", "failed", "cancelled"))
    assert ended == metric("kvrelay_request_edges_total", edge="accepted") > 0
    assert metric("kvrelay_request_success_total") == metric("kvrelay_request_edges_total", edge="finished")
    assert metric("kvrelay_requests_running") == metric("kvrelay_requests_waiting") == 0
