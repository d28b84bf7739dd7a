"""A node tells the coordinators that ask of its cached blocks: all of them, and then what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored, NodeStatus
from kvrelay.kv.cache_feed import MAX_MESSAGE_HASHES
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.rpc.membership import Membership
from kvrelay.types import BlockHash, BlockId
from tests.support.cache_listener import CacheListener
from tests.support.grpc_ends import serving
from tests.support.messages import EXAMPLE_NODE

TIMEOUT_S = 20.0


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
    coordinator, named = CacheListener(), NamedBlocks()
    claim(named, 1, 2)
    async with serving(coordinator.register) as port, member(port, named):
        assert await coordinator.told.get() == CacheEvents(1, (CacheCleared(), CacheStored(hashes(1, 2))))
        claim(named, 3, 4, 5)
        named.remove(hashes(1)[0])
        named.remove(hashes(4)[0])
        assert await coordinator.told.get() == CacheEvents(3, (CacheRemoved(hashes(1)), CacheStored(hashes(3, 5))))


async def test_changes_on_another_thread_are_told_though_no_status_is_due() -> None:
    coordinator, named = CacheListener(), NamedBlocks()
    async with serving(coordinator.register) as port, member(port, named):
        await coordinator.told.get()
        await asyncio.to_thread(claim, named, 1, 2)
        told = set[BlockHash]()
        while told != set(hashes(1, 2)):
            (event,) = (await coordinator.told.get()).events
            assert isinstance(event, CacheStored)
            told.update(event.hashes)


async def test_a_long_story_comes_in_messages_of_bounded_size_and_again_when_asked() -> None:
    coordinator, named = CacheListener(), NamedBlocks()
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
            coordinator.ask_again()
        assert (await coordinator.told.get()).first_sequence == 9, "numbers go on"


async def test_a_coordinator_that_restarts_hears_of_everything_with_new_numbers() -> None:
    first, second, named = CacheListener(), CacheListener(), NamedBlocks()
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
    coordinator, named = CacheListener(asks=False), NamedBlocks()
    claim(named, 1)
    async with serving(coordinator.register) as port, member(port, named, interval_s=0.01):
        while coordinator.num_statuses < 10:
            await asyncio.sleep(0.01)
        assert coordinator.told.empty()


async def test_a_node_without_cached_blocks_leaves_the_question_open() -> None:
    coordinator = CacheListener()
    async with serving(coordinator.register) as port, member(port, None, interval_s=0.01) as membership:
        while coordinator.num_statuses < 10:
            await asyncio.sleep(0.01)
        assert membership.joined
        assert coordinator.told.empty()
