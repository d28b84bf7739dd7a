"""A whole prefill node on a tiny model, with a real kvstore behind it: first tokens are those of one engine alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.messages import NodeRequest, PrefillFinished
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import PrefillClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import CachedTokens, InstanceId, RequestId
from kvstore.config import KVStoreConfig
from kvstore.main import KVStoreApp
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.hosting import hosted
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[ReferenceEngine]:
    return ReferenceEngine(model)


def make_request(num_tokens: int, temperature: float = 0.0) -> NodeRequest:
    token_ids = tuple(3 + (7 * i) % 250 for i in range(num_tokens))
    sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=1)
    return NodeRequest(RequestId("r"), token_ids, num_tokens, sampling)


@asynccontextmanager
async def prefill_node(model: Path, **settings: object) -> AsyncIterator[PrefillClient]:
    config = PrefillConfig(model=model, dtype="float32", threads=1, num_blocks=64, **settings)  # type: ignore[arg-type]
    app = PrefillApp(config, InstanceId("prefill"), CollectorRegistry())
    async with hosted(app) as address, open_channel(address) as channel:
        yield PrefillClient(channel)


async def prefill(client: PrefillClient, request: NodeRequest) -> PrefillFinished:
    async with client.prefill(request, None, timeout_s=30.0) as events:
        finished = [event async for event in events][-1]
    assert isinstance(finished, PrefillFinished)
    return finished


@pytest.mark.parametrize("chunk_tokens", [7, 16, 512])
async def test_chunks_and_cached_prefixes_do_not_change_the_first_token(
    model: Path, reference: ReferenceEngine, chunk_tokens: int
) -> None:
    async with prefill_node(model, chunk_tokens=chunk_tokens) as client:
        for temperature in (0.0, 0.9):
            for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 100, 250):
                request = make_request(num_tokens, temperature)
                cold, warm = await prefill(client, request), await prefill(client, request)
                assert [cold.first_token.token_id] == [warm.first_token.token_id] == reference.answer(request)
                assert warm.cached == CachedTokens(device=(num_tokens - 1) // 16 * 16)


async def test_a_new_node_finds_its_prefixes_in_memory_and_a_new_store_finds_them_on_disk(
    model: Path, reference: ReferenceEngine, tmp_path: Path
) -> None:
    request = make_request(200)
    expected = reference.answer(request)
    config = KVStoreConfig(path=str(tmp_path / "store"), disk_bytes=1 << 24)
    found: list[CachedTokens] = []
    for num_nodes in (2, 1):
        async with hosted(KVStoreApp(config, InstanceId("store"), CollectorRegistry())) as store_address:
            for _ in range(num_nodes):
                async with prefill_node(model, kvstore=(store_address,)) as client:  # its end waits for the offload
                    finished = await prefill(client, request)
                    assert [finished.first_token.token_id] == expected
                    found.append(finished.cached)
    assert found == [CachedTokens(), CachedTokens(memory=192), CachedTokens(disk=192)]


async def test_a_store_that_is_not_there_costs_nothing_but_the_hit(model: Path, reference: ReferenceEngine) -> None:
    request = make_request(100)
    async with prefill_node(model, kvstore=("127.0.0.1:1",)) as client:
        finished = await prefill(client, request)
    assert finished.cached == CachedTokens()
    assert [finished.first_token.token_id] == reference.answer(request)
