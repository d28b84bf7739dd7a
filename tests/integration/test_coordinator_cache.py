"""Requests go where nodes say that their prefix is cached, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from kvrelay.cluster import CacheCleared, CacheEvents, CacheStored, NodeInfo, NodeRates
from kvrelay.errors import TargetOutOfReachError
from kvrelay.inference import TokenPrompt
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc
from kvrelay.rpc import convert_cluster
from kvrelay.types import BlockHash, BlockId, CachedTokens, InstanceId, Role
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, several_ends
from tests.support.fake_nodes import MODEL, FakeDecodeNode, FakeNode

PROMPT = TokenPrompt(tuple(range(3, 103)))  # 6 full blocks


async def hashes_of(cluster: Ends, prompt: TokenPrompt) -> list[BlockHash]:
    """As the coordinator names them: by the tenant's salt, which a request of another prompt shows."""
    await cluster.ask(TokenPrompt((3, 4, 5)))
    salt = cluster.decode[0].requests[-1].tenant_salt
    return block_hashes(chain_root(MODEL.fingerprint, MODEL.layout.fingerprint, salt), prompt.token_ids, 16)


async def tells(node: FakeNode) -> NamedBlocks:
    """From now on, with nothing cached yet."""
    node.cached_blocks = NamedBlocks()
    await node.join_again()
    return node.cached_blocks


def store(named: NamedBlocks, hashes: Sequence[BlockHash]) -> None:
    for number, block_hash in enumerate(hashes):
        named.claim(block_hash, BlockId(number))


async def until_known(cluster: Ends, role: Role, num_blocks: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while cluster.metric("kvrelay_prefix_index_blocks", role=role.value) != num_blocks:
            await asyncio.sleep(0.01)


async def test_a_prompt_goes_where_its_prefix_is_and_no_more_once_it_was_evicted() -> None:
    async with ends(num_prefill=2, num_decode=2) as cluster:
        hashes = await hashes_of(cluster, PROMPT)
        caches = {node: await tells(node) for node in cluster.nodes}
        for holder, other, role in (
            (cluster.prefill[1], cluster.prefill[0], Role.PREFILL_NODE),
            (cluster.decode[1], cluster.decode[0], Role.DECODE_NODE),
        ):
            store(caches[holder], hashes)
            store(caches[other], hashes[:1])
            await until_known(cluster, role, 7)
        await cluster.ask(PROMPT)
        assert [
            node.requests[-1].token_ids == PROMPT.token_ids for node in (cluster.prefill[1], cluster.decode[1])
        ] == [
            True,
            True,
        ]
        for node, role in ((cluster.prefill[1], Role.PREFILL_NODE), (cluster.decode[1], Role.DECODE_NODE)):
            for block_hash in hashes:
                caches[node].remove(block_hash)
            await until_known(cluster, role, 1)
        await cluster.ask(PROMPT)
        assert [
            node.requests[-1].token_ids == PROMPT.token_ids for node in (cluster.prefill[0], cluster.decode[0])
        ] == [
            True,
            True,
        ]


async def test_a_burst_of_one_prompt_stays_together_before_its_node_tells() -> None:
    async with ends(num_decode=2) as cluster:
        for node in cluster.decode:
            await tells(node)
        await cluster.ask(PROMPT)
        first, other = sorted(cluster.decode, key=lambda node: -len(node.requests))
        other.num_blocks = 64  # it would be the better one otherwise
        other.tell()
        await cluster.until_status(lambda status: any(node.status.blocks.free == 64 for node in status.nodes))
        await cluster.ask(PROMPT)
        assert [len(node.requests) for node in (first, other)] == [2, 0]


async def test_what_a_node_had_is_forgotten_when_it_is_gone_or_another_process_takes_its_place() -> None:
    async with ends(num_decode=2, member_timeout_s=0.5) as cluster:
        hashes = await hashes_of(cluster, PROMPT)
        for node in cluster.decode:
            store(await tells(node), hashes)
        await until_known(cluster, Role.DECODE_NODE, 12)
        old = cluster.decode[0]
        port = int(old.address.rpartition(":")[2])
        await old.stop()
        new = FakeDecodeNode("decode-again")
        new.cached_blocks = NamedBlocks()
        store(new.cached_blocks, hashes[:2])
        cluster.decode[0] = new
        await new.start(cluster.address, port=port)
        await until_known(cluster, Role.DECODE_NODE, 8)
        await cluster.decode.pop().stop()
        await until_known(cluster, Role.DECODE_NODE, 2)


async def test_every_coordinator_hears_of_it() -> None:
    async with several_ends(2) as (first, second):
        named = await tells(first.decode[0])
        hashes = [BlockHash(bytes([number]) * 32) for number in range(5)]
        store(named, hashes)
        for one in (first, second):
            await until_known(one, Role.DECODE_NODE, 5)
        named.remove(hashes[0])
        for one in (first, second):
            await until_known(one, Role.DECODE_NODE, 4)


def joined(role: Role) -> cluster_pb2.NodeEvent:
    model = None if role is Role.KVSTORE else MODEL
    info = NodeInfo(role, InstanceId("stranger"), "127.0.0.1:9", model)
    return cluster_pb2.NodeEvent(joined=convert_cluster.node_info_to_pb(info))


def told(first_sequence: int, *events: CacheCleared | CacheStored) -> cluster_pb2.NodeEvent:
    wire = convert_cluster.cache_events_to_pb(CacheEvents(first_sequence, events))
    return cluster_pb2.NodeEvent(cache=wire)


async def test_a_node_that_lost_count_is_asked_for_all_it_has() -> None:
    stored = CacheStored([BlockHash(bytes(32))])

    async def says() -> AsyncIterator[cluster_pb2.NodeEvent]:
        yield joined(Role.DECODE_NODE)
        yield told(1, CacheCleared(), stored)
        yield told(4, stored)
        await asked_again.wait()

    asked_again = asyncio.Event()
    async with ends() as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        events = []
        async for event in cluster_pb2_grpc.ClusterStub(channel).Join(says(), timeout=TIMEOUT_S):
            events.append(event.WhichOneof("event"))
            if len(events) == 3:
                asked_again.set()
        assert events == ["accepted", "resync", "resync"]
        assert cluster.metric("kvrelay_prefix_index_resyncs_total", role="decode-node") == 1
        assert cluster.metric("kvrelay_prefix_index_told_blocks_total", role="decode-node") == 1


async def come_and_go(cluster: Ends, caches: dict[FakeNode, NamedBlocks], hashes: Sequence[BlockHash]) -> None:
    for node, named in caches.items():
        store(named, hashes)
        await until_known(cluster, node.role, len(hashes))
        for block_hash in hashes:
            named.remove(block_hash)
        await until_known(cluster, node.role, 0)


async def test_a_target_is_in_reach_where_the_kvstore_is_expected_to_have_what_nodes_gave_up() -> None:
    """Computing the prompt takes a second, loading its six full blocks 6 ms."""
    async with ends() as cluster:
        hashes, prefill = await hashes_of(cluster, PROMPT), cluster.prefill[0]
        prefill.rates = NodeRates(prefill_tokens_per_s=100.0, store_bytes_per_s=1_000.0 * MODEL.layout.slab_bytes)
        caches = {node: await tells(node) for node in cluster.nodes}
        await come_and_go(cluster, caches, hashes)
        with pytest.raises(TargetOutOfReachError, match=r"in about 1 s"):  # no store has ever given anything
            await cluster.ask(PROMPT, ttft_target_s=0.5)
        prefill.cached = CachedTokens(memory=64, disk=32)
        await cluster.ask(PROMPT)
        await come_and_go(cluster, caches, hashes)
        await cluster.ask(PROMPT, ttft_target_s=0.5)
        assert prefill.reached["start"] == 2


async def test_a_store_has_no_cached_blocks_to_tell_of() -> None:
    async with ends() as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        says = iter([joined(Role.KVSTORE), told(1, CacheCleared())])
        call = cluster_pb2_grpc.ClusterStub(channel).Join(says, timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError, match="a kvstore has no cached blocks") as failed:
            async for _ in call:
                pass
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
