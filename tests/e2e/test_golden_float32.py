"""Real processes, the real model, float32: the reference tokens, wherever the prefix is found.

The tests of this module share one cluster and run in order: each finds the prefixes where the ones before left them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.kv.layout import KVLayout
from kvrelay.sampling import SamplingParams
from kvrelay.types import CachedTokens
from tests.support import golden
from tests.support.answers import GREEDY_64, Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CASES = golden.load(golden.FLOAT32)
BEGINNING = replace(GREEDY_64, max_tokens=16)  # tells as well as the whole whether a prompt's KV is what it was
SLAB_BYTES = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32").slab_bytes
NUM_NODES = 2


@pytest.fixture(scope="module")
def cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("golden")
    # Tails are computed on the prefill node unless a test's name says otherwise, so that every answer is handed over.
    arguments = ["--local-tail-tokens", "0"]
    loading = ["--prefix-load", "always"]  # so that what is found where does not depend on the machine's load
    # Fresh, since all must come to the same hashes.
    shape = Cluster(
        demo_model, directory, coordinator_args=arguments, prefill_args=loading, num_blocks=2048, fresh=True
    )
    with running(shape) as started:
        yield started


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


async def ask_all(client: AsyncClient, concurrency: int, sampling: SamplingParams = GREEDY_64) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)

    async def one(case: golden.GoldenCase) -> Answer:
        async with gate:
            return await ask(client, case.prompt_ids, sampling)

    return list(await asyncio.gather(*map(one, CASES)))


def check(answers: list[Answer], num_tokens: int = 64) -> None:
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.token_ids == case.output_ids[:num_tokens], case.name
        assert answer.finished.usage.prompt_tokens == len(case.prompt_ids), case.name
        assert answer.finished.usage.completion_tokens == num_tokens, case.name


def check_nothing_was_computed_twice(cluster: Cluster, answers: list[Answer]) -> None:
    """Of all answers so far: prompts on the prefill node but for what was cached, answers on the decode node but for
    the first token, which came with the KV, and the last, which nothing follows."""
    num_prompt = sum(answer.finished.usage.prompt_tokens - answer.finished.usage.cached.total for answer in answers)
    num_decoded = sum(len(answer.token_ids) - 1 for answer in answers)
    assert cluster.prefill[0].metric("kvrelay_prefill_tokens_computed_total") == num_prompt
    assert cluster.decode[0].metric("kvrelay_decode_tokens_computed_total") == num_decoded


def full_blocks(prompt_ids: tuple[int, ...]) -> int:
    """Tokens in the blocks a later request can share: all full ones, but never the block of the last token."""
    return (len(prompt_ids) - 1) // 16 * 16


def restart(*roles: object) -> None:
    for role in roles:
        assert role.stop() == 0  # type: ignore[attr-defined]
    for role in roles:
        role.start()  # type: ignore[attr-defined]
    for role in roles:
        role.wait_ready()  # type: ignore[attr-defined]


async def wait_until_stored(cluster: Cluster, tier: str, num_blocks: int) -> None:
    """Offloading is in the background; what the next test needs must have arrived."""
    assert cluster.store is not None
    async with asyncio.timeout(60):
        while cluster.store.metric("kvrelay_store_blocks", tier=tier) < num_blocks:
            await asyncio.sleep(0.05)


NUM_STORED_BLOCKS = len({case.prompt_ids[: 16 * (i + 1)] for case in CASES for i in range(len(case.prompt_ids) // 16)})


async def test_cold_one_after_another(cluster: Cluster, client: AsyncClient) -> None:
    answers = await ask_all(client, 1, replace(GREEDY_64, max_tokens=24))  # whole ones come eight at once
    check(answers, 24)
    seen: set[tuple[int, ...]] = set()
    for case, answer in zip(CASES, answers, strict=True):
        if not any(case.prompt_ids[:16] == earlier[:16] for earlier in seen):
            assert answer.finished.usage.cached == CachedTokens(), case.name
            assert answer.finished.handoff_bytes == -(-len(case.prompt_ids) // 16) * SLAB_BYTES, case.name
        seen.add(case.prompt_ids)
    await wait_until_quiet(client, NUM_NODES)  # a prefill node counts a prompt when it hears that it was committed
    check_nothing_was_computed_twice(cluster, answers)


async def test_prefix_on_the_devices(client: AsyncClient) -> None:
    answers = await ask_all(client, 4, BEGINNING)
    check(answers, 16)
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.finished.usage.cached == CachedTokens(device=full_blocks(case.prompt_ids)), case.name
        assert answer.finished.handoff_bytes == SLAB_BYTES, case.name  # the last block alone


async def test_eight_at_once(client: AsyncClient) -> None:
    check(await ask_all(client, concurrency=8))


async def test_prefix_in_the_stores_memory_after_both_nodes_restarted(cluster: Cluster, client: AsyncClient) -> None:
    await wait_until_stored(cluster, "memory", NUM_STORED_BLOCKS)
    await asyncio.to_thread(restart, *cluster.prefill, *cluster.decode)
    await wait_until_quiet(client, NUM_NODES)
    answers = await ask_all(client, 4, BEGINNING)
    check(answers, 16)
    for case, answer in zip(CASES, answers, strict=True):
        cached = answer.finished.usage.cached
        assert cached.total == full_blocks(case.prompt_ids), case.name
        assert cached.disk == 0, case.name
    assert sum(answer.finished.usage.cached.memory for answer in answers) >= 1500


async def test_prefix_on_disk_after_the_store_restarted_too(cluster: Cluster, client: AsyncClient) -> None:
    assert cluster.store is not None
    await asyncio.to_thread(restart, cluster.store, *cluster.prefill, *cluster.decode)
    await wait_until_quiet(client, NUM_NODES)
    answers = await ask_all(client, 4, BEGINNING)
    check(answers, 16)
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.finished.usage.cached.total == full_blocks(case.prompt_ids), case.name
    assert sum(answer.finished.usage.cached.disk for answer in answers) >= 1500
