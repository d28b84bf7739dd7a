"""A node tells the coordinators that ask of its cached blocks: all of them, and then what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored, NodeStatus
from kvrelay.kv.cache_feed import MAX_MESSAGE_HASHES
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc
from kvrelay.rpc import convert_cluster
from kvrelay.rpc.membership import Membership
from kvrelay.types import BlockHash, BlockId
from tests.support.grpc_ends import serving
from tests.support.messages import EXAMPLE_NODE

TIMEOUT_S = 20.0


class Listener(cluster_pb2_grpc.ClusterServicer):
    """A coordinator that accepts a node, and asks it for its cache unless it is an older one."""

    def __init__(self, *, asks: bool = True) -> None:
        self.asks = asks
        self.told: asyncio.Queue[CacheEvents] = asyncio.Queue()
        self.num_statuses = 0
        self.says: asyncio.Queue[cluster_pb2.JoinEvent] = asyncio.Queue()
        self.ended = asyncio.Event()

    async def Join(self, request_iterator: AsyncIterator[cluster_pb2.NodeEvent], context: Any) -> AsyncIterator[Any]:
        reading = asyncio.create_task(self._read(request_iterator))
        yield cluster_pb2.JoinEvent(accepted=cluster_pb2.JoinAccepted(coordinator_instance_id="c"))
        if self.asks:
            yield resync()
        try:
            while not self.ended.is_set():
                saying, ending = asyncio.create_task(self.says.get()), asyncio.create_task(self.ended.wait())
                await asyncio.wait((saying, ending), return_when=asyncio.FIRST_COMPLETED)
                ending.cancel()
                if not saying.done():
                    saying.cancel()
                    return
                yield saying.result()
        finally:
            reading.cancel()

    async def _read(self, events: AsyncIterator[cluster_pb2.NodeEvent]) -> None:
        async for event in events:
            if event.WhichOneof("event") == "cache":
                self.told.put_nowait(convert_cluster.cache_events_from_pb(event.cache))
            self.num_statuses += event.WhichOneof("event") == "status"

    def register(self, server: Any) -> None:
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, server)


def resync() -> cluster_pb2.JoinEvent:
    return cluster_pb2.JoinEvent(resync=cluster_pb2.Resync())


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "big")) for number in numbers]


def claim(named: NamedBlocks, *numbers: int) -> None:
    for number, block_hash in zip(numbers, hashes(*numbers), strict=True):
        named.claim(block_hash, BlockId(number))


@asynccontextmanager
async def member(port: int, named: NamedBlocks | None, interval_s: float = 3600.0) -> AsyncIterator[Membership]:
    membership = Membership(
        f"127.0.0.1:{port}", EXAMPLE_NODE, lambda: NodeStatus(ready=True), interval_s=interval_s, cached=named
    )
    await membership.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield membership
    finally:
        await membership.close()


async def test_all_that_is_cached_and_then_what_changes() -> None:
    coordinator, named = Listener(), NamedBlocks()
    claim(named, 1, 2)
    async with serving(coordinator.register) as port, member(port, named):
        assert await coordinator.told.get() == CacheEvents(1, (CacheCleared(), CacheStored(hashes(1, 2))))
        claim(named, 3, 4, 5)
        named.remove(hashes(1)[0])
        named.remove(hashes(4)[0])
        assert await coordinator.told.get() == CacheEvents(3, (CacheRemoved(hashes(1)), CacheStored(hashes(3, 5))))


async def test_changes_on_another_thread_are_told_though_no_status_is_due() -> None:
    coordinator, named = Listener(), NamedBlocks()
    async with serving(coordinator.register) as port, member(port, named):
        await coordinator.told.get()
        await asyncio.to_thread(claim, named, 1, 2)
        told = set[BlockHash]()
        while told != set(hashes(1, 2)):
            (event,) = (await coordinator.told.get()).events
            assert isinstance(event, CacheStored)
            told.update(event.hashes)


async def test_a_long_story_comes_in_messages_of_bounded_size_and_again_when_asked() -> None:
    coordinator, named = Listener(), NamedBlocks()
    total = 2 * MAX_MESSAGE_HASHES + 10
    claim(named, *range(total))
    async with serving(coordinator.register) as port, member(port, named):
        for _ in range(2):
            sizes = []
            while sum(sizes) < total:
                told = await coordinator.told.get()
                assert (told.events[0] == CacheCleared()) == (not sizes)
                assert isinstance(told.events[-1], CacheStored)
                sizes.append(len(told.events[-1].hashes))
            assert sizes == [MAX_MESSAGE_HASHES, MAX_MESSAGE_HASHES, 10]
            coordinator.says.put_nowait(resync())
        assert (await coordinator.told.get()).first_sequence == 9, "numbers go on"


async def test_a_coordinator_that_restarts_hears_of_everything_with_new_numbers() -> None:
    first, second, named = Listener(), Listener(), NamedBlocks()
    claim(named, 1)
    async with serving(first.register) as port:
        membership = Membership(f"127.0.0.1:{port}", EXAMPLE_NODE, NodeStatus, cached=named)
        await membership.start()
        async with asyncio.timeout(TIMEOUT_S):
            await first.told.get()
            claim(named, 2)
            await first.told.get()
    async with asyncio.timeout(TIMEOUT_S):
        await membership.wait_left()
        claim(named, 3)
        async with serving(second.register, port=port):
            assert await second.told.get() == CacheEvents(1, (CacheCleared(), CacheStored(hashes(1, 2, 3))))
            await membership.close()


async def test_a_coordinator_that_does_not_ask_hears_nothing_it_would_not_understand() -> None:
    coordinator, named = Listener(asks=False), NamedBlocks()
    claim(named, 1)
    async with serving(coordinator.register) as port, member(port, named, interval_s=0.01):
        while coordinator.num_statuses < 10:
            await asyncio.sleep(0.01)
        assert coordinator.told.empty()


async def test_a_node_without_cached_blocks_leaves_the_question_open() -> None:
    coordinator = Listener()
    async with serving(coordinator.register) as port, member(port, None, interval_s=0.01) as membership:
        while coordinator.num_statuses < 10:
            await asyncio.sleep(0.01)
        assert membership.joined
        assert coordinator.told.empty()
