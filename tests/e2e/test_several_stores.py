"""Two kvstores, a replica each, or a Redis: real processes, a tiny model, and pools that keep no prompt for long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, free_port, running
from tests.support.redis_server import redis_server
from tests.support.reference import ReferenceEngine
from tests.support.soak import TIMEOUT_S
from tests.support.tiny_requests import expected, greedy, random_prompt, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S)]

PROMPTS = [random_prompt(160, 900 + number) for number in range(4)]
NUM_PROMPT_BLOCKS = 10
NUM_REUSABLE_TOKENS = 144
NUM_BLOCKS = 24  # of each node's pool: two prompts


@contextmanager
def cluster_with(model: Path, directory: Path, *flags: str) -> Iterator[Cluster]:
    """Without a store of its own."""
    nodes = list(flags)
    shape = Cluster(
        *(model, directory),
        with_store=False,
        num_blocks=NUM_BLOCKS,
        prefill_args=["--prefix-load", "always", *nodes],
        decode_args=nodes,
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


async def ask_all(client: AsyncClient, reference: ReferenceEngine) -> int:
    """Asks every prompt and compares each answer; how many tokens came from a store."""
    num_loaded = 0
    for prompt_ids in PROMPTS:
        answer = await ask(client, prompt_ids, greedy(4))
        assert answer.token_ids == expected(reference, prompt_ids, 4)
        num_loaded += answer.finished.usage.cached.memory + answer.finished.usage.cached.disk
    return num_loaded


async def fill(cluster: Cluster, client: AsyncClient, reference: ReferenceEngine) -> None:
    assert await ask_all(client, reference) == 0
    blocks = NUM_PROMPT_BLOCKS * len(PROMPTS)
    prefill = cluster.prefill[0]
    await wait_until(lambda: prefill.metric("kvrelay_store_offloaded_total") >= blocks, 60.0, "all is offloaded")


@contextmanager
def stores(directory: Path, count: int) -> Iterator[list[RoleProcess]]:
    started = []
    try:
        for index in range(count):
            args = ["--port", str(free_port()), "--path", str(directory / f"store-{index}")]
            started.append(RoleProcess("kvstore", args, directory / f"kvstore-{index}.log"))
            started[-1].restart()
        yield started
    finally:
        for store in started:
            if store.running:
                store.kill()


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_two_stores_share_the_prompts_and_a_replica_outlives_the_other(
    model: Path, reference: ReferenceEngine, tmp_path: Path, num_replicas: int
) -> None:
    with stores(tmp_path, 2) as (first, second):
        flags = ["--kvstore", f"{first.address},{second.address}", "--kvstore-replicas", str(num_replicas)]
        with cluster_with(model, tmp_path, *flags) as cluster:
            async with AsyncClient(cluster.address) as client:
                await fill(cluster, client, reference)
                held = [store.metric("kvrelay_store_blocks", tier="memory") for store in (first, second)]
                assert sum(held) == NUM_PROMPT_BLOCKS * len(PROMPTS) * num_replicas
                assert all(blocks % NUM_PROMPT_BLOCKS == 0 for blocks in held), "each prompt lies whole somewhere"
                assert await ask_all(client, reference) == NUM_REUSABLE_TOKENS * len(PROMPTS)
                first.kill()
                await ask_all(client, reference)  # finds out
                left = len(PROMPTS) if num_replicas == 2 else held[1] // NUM_PROMPT_BLOCKS
                assert await ask_all(client, reference) >= NUM_REUSABLE_TOKENS * left
                await wait_until_quiet(client, 2)


async def test_a_redis_serves_as_the_store(model: Path, reference: ReferenceEngine, tmp_path: Path) -> None:
    async with redis_server() as (address, process):
        with cluster_with(model, tmp_path, "--kvstore", address) as cluster:
            async with AsyncClient(cluster.address) as client:
                await fill(cluster, client, reference)
                assert await ask_all(client, reference) == NUM_REUSABLE_TOKENS * len(PROMPTS)
                process.kill()
                await process.wait()
                assert await ask_all(client, reference) == 0
                await wait_until_quiet(client, 2)
