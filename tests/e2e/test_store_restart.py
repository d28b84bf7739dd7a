"""A prefix outlives every process that had a part in it: all of them go, and the store's disk still has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S
from tests.support.tiny_requests import ask_until_served, expected, greedy, random_prompt, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

NUM_NODES = 2
PROMPT_TOKENS = 200
REUSABLE_BLOCKS = 12  # of 16 tokens: the last block of a prompt, full or not, is always computed
ANSWER_TOKENS = 8
STORED_S = 60.0


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Cluster(model, tmp_path_factory.mktemp("cluster"), fresh=True)) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


@pytest.mark.parametrize(("ending", "seed"), [("stopped", 100), ("killed", 200)])
async def test_after_every_process_came_back_the_prefix_is_read_from_disk_and_the_answer_is_the_same(
    cluster: Cluster, client: AsyncClient, reference: ReferenceEngine, ending: str, seed: int
) -> None:
    prompt_ids = random_prompt(PROMPT_TOKENS, seed)
    num_before = await asyncio.to_thread(blocks_on_disk, cluster)
    first = await ask(client, prompt_ids, greedy(ANSWER_TOKENS))
    assert first.token_ids == expected(reference, prompt_ids, ANSWER_TOKENS)
    assert first.finished.usage.cached.total == 0
    await wait_until(lambda: blocks_on_disk(cluster) >= num_before + REUSABLE_BLOCKS, STORED_S, "the prefix is on disk")
    await asyncio.to_thread(replace_all, cluster, killed=ending == "killed")
    async with asyncio.timeout(STORED_S):
        again = await ask_until_served(client, prompt_ids, ANSWER_TOKENS)
    assert again.token_ids == first.token_ids
    assert again.text == first.text
    assert again.finished.usage.cached.disk == REUSABLE_BLOCKS * 16
    assert again.finished.usage.cached.total == REUSABLE_BLOCKS * 16


def blocks_on_disk(cluster: Cluster) -> int:
    assert cluster.store is not None
    return int(cluster.store.metric("kvrelay_store_blocks", tier="disk"))


def replace_all(cluster: Cluster, *, killed: bool) -> None:
    """By new processes that have none of the old ones' memory."""
    for role in reversed(cluster.roles):
        if killed:
            role.kill()
        else:
            assert role.stop() == 0
    for role in cluster.roles:
        role.start()
    for role in cluster.roles:
        role.wait_ready()
