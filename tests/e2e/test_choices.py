"""Several answers to one prompt by real processes on a tiny random model, checked against an engine that answers alone:
answer i is what a request with its seed would get, whatever else happens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.inference import ChoiceFinished, TokenPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams, fork_seed
from kvrelay.types import FinishReason
from tests.support.answers import ANSWER_TIMEOUT_S, ask, wait_until_quiet
from tests.support.choices import Choices, collect_choices
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.tiny_requests import expected, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

NUM_NODES = 3
SEED = 20_251_130
BLOCK_TOKENS = 16
NUM_KILLED_TOKENS = 300  # of an answer: it is not over when its node is killed
COMPUTED = "kvrelay_prefill_tokens_computed_total"


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("choices")
    with running(Cluster(model, directory, num_decode=2, num_blocks=128, with_store=False)) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


def drawing(max_tokens: int, **changes: object) -> SamplingParams:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=SEED, max_tokens=max_tokens, ignore_eos=True)
    return replace(params, **changes)  # type: ignore[arg-type]


async def ask_for(client: AsyncClient, n: int, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Choices:
    events = client.generate(TokenPrompt(prompt_ids), sampling, n=n, timeout_s=ANSWER_TIMEOUT_S)
    return await collect_choices(events)


def expected_choice(
    reference: ReferenceEngine, prompt_ids: tuple[int, ...], sampling: SamplingParams, index: int
) -> tuple[int, ...]:
    alone = replace(sampling, seed=fork_seed(SEED, index))
    return expected(reference, prompt_ids, alone)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33, 100, 320])
async def test_each_answer_is_what_its_seed_alone_gives(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine, num_tokens: int
) -> None:
    prompt_ids, sampling = random_prompt(num_tokens, seed=num_tokens), drawing(24)
    computed_before = cluster.prefill[0].metric(COMPUTED)
    outcome = await ask_for(client, 4, prompt_ids, sampling)
    answers = [outcome.token_ids(index) for index in range(4)]
    assert answers == [expected_choice(reference, prompt_ids, sampling, index) for index in range(4)]
    assert len(set(answers)) == 4
    assert outcome.finished is not None
    assert (outcome.finished.usage.prompt_tokens, outcome.finished.usage.completion_tokens) == (num_tokens, 4 * 24)
    num_computed = cluster.prefill[0].metric(COMPUTED) - computed_before
    assert num_computed <= num_tokens + 3 * BLOCK_TOKENS, "the others find the prompt's full blocks"
    for index in range(2):
        alone = await ask(client, prompt_ids, replace(sampling, seed=fork_seed(SEED, index)))
        assert alone.token_ids == answers[index]


async def test_greedy_answers_are_equal(client: AsyncClient, reference: ReferenceEngine) -> None:
    prompt_ids, sampling = random_prompt(50, seed=1), drawing(16, temperature=0.0)
    outcome = await ask_for(client, 3, prompt_ids, sampling)
    assert {outcome.token_ids(index) for index in range(3)} == {expected_choice(reference, prompt_ids, sampling, 0)}


async def test_stop_strings_and_log_probabilities_are_each_answers_own(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    """The stop string is one that only the second answer has: it ends that one and no other."""
    prompt_ids = random_prompt(70, seed=2)
    whole = [expected_choice(reference, prompt_ids, drawing(32), index) for index in range(3)]
    texts = [await client.detokenize(ids) for ids in whole]
    stop = next(
        texts[1][start : start + 2]
        for start in range(4, len(texts[1]) - 2)
        if texts[1][start : start + 2].isascii()
        and not any(texts[1][start : start + 2] in texts[other] for other in (0, 2))
    )
    outcome = await ask_for(client, 3, prompt_ids, drawing(32, stop=(stop,), logprobs=2))
    assert outcome.texts[1] == texts[1][: texts[1].index(stop)]
    assert (outcome.ends[1].reason, outcome.ends[1].stop_string) == (FinishReason.STOP, stop)
    for index in (0, 2):
        assert outcome.token_ids(index) == whole[index]
        assert outcome.texts[index] == texts[index]
        assert (outcome.ends[index].reason, outcome.ends[index].stop_string) == (FinishReason.LENGTH, "")
    for tokens in outcome.tokens.values():
        for token in tokens:
            assert token.logprobs is not None
            assert token.logprobs.chosen.token_id == token.token_id
            assert len(token.logprobs.top) == 2
            assert math.isfinite(token.logprobs.chosen.logprob)


async def test_a_client_that_leaves_after_one_answer_holds_nothing(client: AsyncClient) -> None:
    async with aclosing(client.generate(TokenPrompt(random_prompt(200, seed=3)), drawing(300), n=6)) as events:
        async for event in events:
            if isinstance(event, TokensGenerated | ChoiceFinished) and event.index > 0:
                break
    await wait_until_quiet(client, NUM_NODES)


async def test_many_requests_for_several_on_a_small_pool(client: AsyncClient, reference: ReferenceEngine) -> None:
    prompts = [random_prompt(120, seed=100 + number) for number in range(6)]
    outcomes = await asyncio.gather(*(ask_for(client, 4, prompt_ids, drawing(40)) for prompt_ids in prompts))
    for prompt_ids, outcome in zip(prompts, outcomes, strict=True):
        for index in range(4):
            assert outcome.token_ids(index) == expected_choice(reference, prompt_ids, drawing(40), index)


async def test_kill_9_of_a_decode_node_costs_every_answer_only_time(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine
) -> None:
    """One of two dies when half of the answers have begun, which may be on either."""
    prompts = [random_prompt(150, seed=200 + number) for number in range(4)]
    begun: set[tuple[int, int]] = set()

    async def one(number: int) -> Choices:
        async def noting() -> AsyncIterator[object]:
            async for event in client.generate(
                TokenPrompt(prompts[number]), drawing(NUM_KILLED_TOKENS), n=3, timeout_s=ANSWER_TIMEOUT_S
            ):
                if isinstance(event, TokensGenerated):
                    begun.add((number, event.index))
                yield event

        return await collect_choices(noting())  # type: ignore[arg-type]

    asking = [asyncio.create_task(one(number)) for number in range(4)]
    async with asyncio.timeout(60):
        while len(begun) < 6:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(cluster.decode[0].kill)
    outcomes = await asyncio.gather(*asking)
    await asyncio.to_thread(cluster.decode[0].restart)
    for prompt_ids, outcome in zip(prompts, outcomes, strict=True):
        for index in range(3):
            assert outcome.token_ids(index) == expected_choice(reference, prompt_ids, drawing(NUM_KILLED_TOKENS), index)
            assert outcome.ends[index].completion_tokens == NUM_KILLED_TOKENS
    assert sum(outcome.finished.retries for outcome in outcomes if outcome.finished) >= 1
