"""A whole prefill node on a tiny model tells of each block that it computed, and of each that gave way."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvrelay.cluster import CacheCleared, CacheRemoved, CacheStored, ModelInfo
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.messages import NodeRequest
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import PrefillClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockHash, InstanceId, RequestId
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.cache_listener import CacheListener
from tests.support.grpc_ends import serving
from tests.support.hosting import hosted
from tests.support.tiny_model import make_tiny_model


async def prefill(client: PrefillClient, token_ids: tuple[int, ...]) -> None:
    request = NodeRequest(RequestId("r"), token_ids, len(token_ids), SamplingParams(temperature=0.0, max_tokens=1))
    async with client.prefill(request, None, timeout_s=30.0) as events:
        async for _ in events:
            pass


def hashes(model: ModelInfo, token_ids: tuple[int, ...]) -> list[BlockHash]:
    return block_hashes(chain_root(model.fingerprint, model.layout.fingerprint, b""), token_ids, 16)


async def until_known(listener: CacheListener, known: set[BlockHash], expected: set[BlockHash]) -> None:
    while known != expected:
        for event in (await listener.told.get()).events:
            match event:
                case CacheCleared():
                    known.clear()
                case CacheStored(stored):
                    known.update(stored)
                case CacheRemoved(removed):
                    known.difference_update(removed)


async def test_a_prefill_node_tells_what_it_has(tmp_path: Path) -> None:
    listener = CacheListener()
    first, second = tuple(range(3, 103)), tuple(range(103, 203))  # 7 blocks each, 6 of them full
    async with serving(listener.register) as port:
        config = PrefillConfig(
            model=make_tiny_model(tmp_path / "tiny", seed=3),
            dtype="float32",
            threads=1,
            num_blocks=8,
            coordinator=(f"127.0.0.1:{port}",),
        )
        app = PrefillApp(config, InstanceId("prefill"), CollectorRegistry())
        async with hosted(app) as address, open_channel(address) as channel, asyncio.timeout(30):
            model = (await listener.joined.get()).model
            assert model is not None
            known = set[BlockHash]()
            await prefill(PrefillClient(channel), first)
            await until_known(listener, known, set(hashes(model, first)))
            await prefill(PrefillClient(channel), second)
            await until_known(listener, known, {*hashes(model, first)[:1], *hashes(model, second)})
