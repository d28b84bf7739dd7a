"""Real processes on a tiny model, with a decode node of eight blocks whose answers grow: every request ends, and every
answer is what it is with memory to spare."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import NeverFitsError
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated, Usage
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import CachedTokens, FinishReason, RequestId
from tests.support.answers import ask, wait_until_quiet
from tests.support.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_NODES = 2  # that compute
TIGHT_BLOCKS = 8  # 128 tokens
LOGPROBS_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill node, and one decode node that is tight."""
    shape = Cluster(
        model,
        tmp_path_factory.mktemp("pressure"),
        num_blocks=64,
        decode_args=["--num-blocks", str(TIGHT_BLOCKS), "--reserve-output-tokens", "1"],
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture(scope="module")
def roomy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Cluster(model, tmp_path_factory.mktemp("roomy"), num_blocks=256, with_store=False)) as started:
        yield started


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


def num_preemptions(cluster: Cluster) -> float:
    return cluster.decode[0].metric("kvrelay_preemptions_total")


def preemption_lines(cluster: Cluster) -> int:
    return cluster.decode[0].log_path.read_text().count("gave its blocks to an older one")


async def test_answers_that_outgrow_the_memory_after_their_handoff_all_end(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """Four prompts of 40 tokens and 80 tokens to generate: each fills the whole pool in the end."""
    before, lines = num_preemptions(cluster), preemption_lines(cluster)
    prompts = [prompt(40, 100 + number) for number in range(4)]
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(ask(client, prompt_ids, greedy(80)) for prompt_ids in prompts))
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(reference, prompt_ids, 80)
        assert answer.finished.reason is FinishReason.LENGTH
        assert (answer.finished.usage.prompt_tokens, answer.finished.usage.completion_tokens) == (40, 80)
    assert num_preemptions(cluster) - before >= 1
    assert preemption_lines(cluster) - lines == num_preemptions(cluster) - before


async def test_a_crowd_on_little_memory_ends_without_being_preempted_for_ever(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """Thirty prompts of 30 tokens and 60 tokens to generate. Somebody always advances."""
    before = num_preemptions(cluster)
    arrivals: list[float] = []

    async def one(number: int) -> tuple[int, ...]:
        token_ids: list[int] = []
        async for event in client.generate(TokenPrompt(prompt(30, 200 + number)), greedy(60), timeout_s=100.0):
            if isinstance(event, TokensGenerated):
                arrivals.append(asyncio.get_running_loop().time())
                token_ids += [token.token_id for token in event.tokens]
        return tuple(token_ids)

    answers = await asyncio.gather(*(one(number) for number in range(30)))
    for number, token_ids in enumerate(answers):
        assert token_ids == expected(reference, prompt(30, 200 + number), 60), number
    assert 1 <= num_preemptions(cluster) - before < 30 * 6, "fewer than blocks were filled"
    assert max(after - since for since, after in itertools.pairwise(arrivals)) < 20.0


async def answer_of(
    client: AsyncClient, prompt_ids: tuple[int, ...], sampling: SamplingParams
) -> tuple[list[GeneratedToken], str, RequestFinished]:
    tokens: list[GeneratedToken] = []
    text = ""
    async for event in client.generate(TokenPrompt(prompt_ids), sampling, timeout_s=100.0):
        if isinstance(event, TokensGenerated):
            tokens += event.tokens
            text += event.text
        elif isinstance(event, RequestFinished):
            return tokens, text, event
    raise AssertionError("the stream ended early")


async def test_preemption_changes_no_token_no_text_and_no_account(
    cluster: Cluster, roomy: Cluster, client: AsyncClient
) -> None:
    """Penalties, a seeded draw, a stop string, log-probabilities: the same on eight blocks as on many."""
    before = num_preemptions(cluster)
    prompts = [prompt(24, 300 + number) for number in range(4)]
    base = {"max_tokens": 60, "ignore_eos": True}
    async with AsyncClient(roomy.address) as spacious:
        _, text, _ = await answer_of(spacious, prompts[3], SamplingParams(temperature=0.0, seed=0, **base))
        stop = next(char for char in text[20:] if char.isascii() and char.isprintable() and char not in text[:20])
        samplings = [
            SamplingParams(temperature=0.0, seed=0, frequency_penalty=1.0, **base),
            SamplingParams(temperature=0.0, seed=0, frequency_penalty=1.0, logprobs=2, **base),
            SamplingParams(temperature=0.8, seed=7, **base),
            SamplingParams(temperature=0.0, seed=0, stop=(stop,), **base),
        ]
        wanted = [await answer_of(spacious, *pair) for pair in zip(prompts, samplings, strict=True)]
    got = await asyncio.gather(*(answer_of(client, *pair) for pair in zip(prompts, samplings, strict=True)))
    assert num_preemptions(cluster) - before >= 1
    for (tokens, text, finished), (same_tokens, same_text, same) in zip(got, wanted, strict=True):
        assert [token.token_id for token in tokens] == [token.token_id for token in same_tokens]
        assert (text, finished.reason, finished.stop_string) == (same_text, same.reason, same.stop_string)
        assert finished.usage == Usage(24, len(tokens), CachedTokens()), "recomputed tokens are no part of it"
        assert finished.usage.completion_tokens == same.usage.completion_tokens
        assert finished.retries == 0
        assert 0 < finished.timing.first_token_s <= finished.timing.total_s
    assert wanted[3][2].stop_string == stop
    for token, same_token in zip(got[1][0], wanted[1][0], strict=True):
        assert token.logprobs is not None
        assert same_token.logprobs is not None
        assert token.logprobs.chosen.logprob == pytest.approx(
            same_token.logprobs.chosen.logprob, abs=LOGPROBS_TOLERANCE
        )


async def test_what_never_fits_is_refused_at_once_and_holds_nobody_up(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    """128 tokens are the whole pool, however few are set aside at first."""
    small = [asyncio.create_task(ask(client, prompt(20, 400 + number), greedy(8))) for number in range(3)]
    for num_tokens, max_tokens in ((100, 29), (128, 2), (127, 2), (200, 8)):
        async with asyncio.timeout(20.0):  # of the 60 that one may wait for room
            with pytest.raises(NeverFitsError):
                await ask(client, prompt(num_tokens, 410), greedy(max_tokens))
    for number, answer in enumerate(await asyncio.gather(*small)):
        assert answer.token_ids == expected(reference, prompt(20, 400 + number), 8)
    whole = await ask(client, prompt(100, 411), greedy(28))
    assert whole.token_ids == expected(reference, prompt(100, 411), 28)


async def test_clients_that_leave_at_any_moment_leave_no_block_behind(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    """Among preempted, waiting, loading and running ones; then the whole pool is there for one request at once."""
    for cycle in range(10):
        asking = [asyncio.create_task(ask(client, prompt(40, 500 + 10 * cycle + n), greedy(80))) for n in range(4)]
        await asyncio.wait(asking, timeout=0.03 * cycle)
        for task in asking[:3]:
            task.cancel()
        answer = (await asyncio.gather(*asking, return_exceptions=True))[3]
        assert not isinstance(answer, BaseException)
        assert answer.token_ids == expected(reference, prompt(40, 503 + 10 * cycle), 80)
    async with asyncio.timeout(60.0):
        assert len((await ask(client, prompt(40, 600), greedy(80))).token_ids) == 80


async def test_preempted_requests_came_back_both_ways(cluster: Cluster, client: AsyncClient) -> None:
    """After all of the above: computed first, then by the kvstore, then whichever was measured to be cheaper. A load
    that came before anything was stored found nothing, and is tried again some preemptions later."""
    metric = cluster.decode[0].metric
    async with asyncio.timeout(120):
        while metric("kvrelay_preempted_blocks_loaded_total") == 0:
            await asyncio.gather(*(ask(client, prompt(40, 700 + number), greedy(80)) for number in range(4)))
    assert metric("kvrelay_preemptions_total", resume="recompute") >= 1
    assert metric("kvrelay_preemptions_total", resume="swap") >= 1
