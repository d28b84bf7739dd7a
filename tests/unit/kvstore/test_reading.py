"""Reading through: what is asked for is served whole, wherever it lies and however little memory there is."""

import asyncio
from pathlib import Path

import pytest

from kvrelay.types import Tier
from kvstore.selector import Selector
from tests.support.manual_clock import ManualClock
from tests.support.open_store import get, opened, put, put_chain, where
from tests.support.store_blocks import hash_of, key_of

MEMORY, DISK = Tier.MEMORY, Tier.DISK


async def test_a_hit_covers_what_is_in_memory_and_what_is_only_on_disk(tmp_path: Path) -> None:
    """KS-05: the lowest tier is looked at for the rest of a prefix, too."""
    async with opened(tmp_path) as store:
        await put_chain(store, *range(40))
    async with opened(tmp_path, memory_blocks=20) as store:
        assert await get(store, *range(10)) == [DISK] * 10
        assert await get(store, *range(40)) == [MEMORY] * 10 + [DISK] * 30


async def test_many_long_prefixes_are_served_whole_by_a_memory_smaller_than_one(tmp_path: Path) -> None:
    """KS-07, KS-11: nothing waits for room that cannot be made, and no hit is cut to what fits."""
    async with opened(tmp_path, memory_blocks=3) as store:
        for first in range(0, 800, 100):
            await put_chain(store, *range(first, first + 40))
        served = await asyncio.gather(*(get(store, *range(first, first + 40)) for first in range(0, 800, 100)))
        assert [len(tiers) for tiers in served] == [40] * 8
        store._memory.check()


@pytest.mark.parametrize("memory_blocks", [0, 100])
async def test_a_reader_that_stops_holds_up_nobody_and_keeps_no_pages(tmp_path: Path, memory_blocks: int) -> None:
    """KS-19: a transaction of a reader lasts for a few blocks' copies, not for as long as the client takes."""
    async with opened(tmp_path, memory_blocks=memory_blocks, disk_bytes=1 << 20, disposable=True) as store:
        await put_chain(store, *range(60))
        stopped = store.get([key_of(n) for n in range(60)])
        await anext(stopped)
        await put(store, *range(1_000, 1_600))
        assert store._disk is not None
        readers = store._disk._env.readers().split("\n")[1:]
        assert all(line.split()[-1] == "-" for line in readers if line.split())
        assert store.stats().write_failures == 0
        assert await get(store, 1_599) != []
        await stopped.aclose()


async def test_a_block_that_is_deleted_while_it_is_read_ahead_is_not_served(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put_chain(store, *range(10))
        reading = store.get([key_of(n) for n in range(10)])
        await anext(reading)
        await store.delete(Selector(block_hash=hash_of(5)))
        assert [tier async for _, tier in reading] == [DISK] * 4


async def test_a_block_that_leaves_memory_while_others_are_sent_is_read_from_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put_chain(store, *range(10))
        reading = store.get([key_of(n) for n in range(10)])
        await anext(reading)
        store._memory.discard(key_of(5))
        assert [tier async for _, tier in reading] == [MEMORY] * 4 + [DISK] * 5


async def test_what_was_served_from_disk_is_served_from_memory_next(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock) as store:
        await put_chain(store, 1, 2, ttl_s=60.0, tenant="a")
    async with opened(tmp_path, clock=clock) as store:
        assert await get(store, 1, 2) == [DISK, DISK]
        assert where(store, 1, 2) == [MEMORY, MEMORY]
        assert {held.info.tenant for held in store.list()} == {"a"}
        assert {held.info.ttl_s for held in store.list()} == {60.0}
