"""What users of other servers reported about reused prefixes, on real processes, a tiny model and pools so small that
they turn over all the time. Each test names its source."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S, scaled
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

BLOCK_TOKENS = 16
NUM_BLOCKS = 64  # six prompts of 160 tokens
NUM_NODES = 2


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = Cluster(
        model, tmp_path_factory.mktemp("cluster"), num_blocks=NUM_BLOCKS, store_args=["--memory-bytes", "256KiB"]
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


@pytest.mark.parametrize("num_tokens", [16, 32, 48, 160])
async def test_a_prompt_that_is_cached_whole_is_answered_again_and_so_are_longer_ones(
    client: AsyncClient, reference: ReferenceEngine, num_tokens: int
) -> None:
    """vllm#3239, vllm#11186, nm-vllm#97: no token left to compute crashed the second request, or broke the chain of
    blocks and with it later hits. The last block of a prompt, full or not, is always computed."""
    prompt_ids = random_prompt(num_tokens, 100 + num_tokens)
    cached = []
    for _ in range(3):
        answer = await ask(client, prompt_ids, greedy(8))
        assert answer.token_ids == expected(reference, prompt_ids, 8)
        cached.append(answer.finished.usage.cached.total)
    assert cached == [0, num_tokens - BLOCK_TOKENS, num_tokens - BLOCK_TOKENS]
    for num_more in (1, 16):
        longer = prompt_ids + random_prompt(num_more, 200)
        answer = await ask(client, longer, greedy(8))
        assert answer.token_ids == expected(reference, longer, 8)
        assert num_tokens - BLOCK_TOKENS <= answer.finished.usage.cached.total <= num_tokens


async def test_pools_that_turn_over_many_times_never_find_a_block_under_an_old_name(
    client: AsyncClient, reference: ReferenceEngine
) -> None:
    """MinivLLM#87: a recycled block was still found by the hash of what had been in it."""
    prompts = [random_prompt(160, 300 + number) for number in range(scaled(20))]
    wanted = {prompt_ids: expected(reference, prompt_ids, 4) for prompt_ids in prompts}
    for turn in range(3):
        random.Random(turn).shuffle(prompts)
        for prompt_ids in prompts:
            answer = await ask(client, prompt_ids, greedy(4))
            assert answer.token_ids == wanted[prompt_ids]
            assert answer.finished.usage.cached.total <= 144


async def test_hits_and_misses_side_by_side_are_both_right(client: AsyncClient, reference: ReferenceEngine) -> None:
    """vllm#7018, tenstorrent/vllm#415: wrong text for the hits of a batch only, or for the misses beside them."""
    shared = random_prompt(200, 500)
    await ask(client, shared, greedy(2))
    for turn in range(scaled(2)):
        prompts = [shared + random_prompt(20, 510 + 10 * turn + number) for number in range(4)]
        prompts += [random_prompt(60, 610 + 10 * turn + number) for number in range(4)]
        answers = await asyncio.gather(*(ask(client, prompt_ids, greedy(24)) for prompt_ids in prompts))
        for prompt_ids, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == expected(reference, prompt_ids, 24)


async def test_conversations_never_go_on_with_each_others_past(client: AsyncClient, reference: ReferenceEngine) -> None:
    """llama.cpp#27148, llama.cpp#27422: under load a reply went on with somebody else's finished chat."""

    async def converse(number: int) -> None:
        past = random_prompt(60, 700 + number)
        for turn in range(3):
            past += random_prompt(20, 800 + 10 * number + turn)
            answer = await ask(client, past, greedy(24))
            assert answer.token_ids == expected(reference, past, 24), f"conversation {number}, turn {turn}"
            past += answer.token_ids

    await asyncio.gather(*(converse(number) for number in range(scaled(12))))
