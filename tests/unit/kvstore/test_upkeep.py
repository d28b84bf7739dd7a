"""What an administrator asks of a live store: pins, deletes, lists, proofs. For compaction see test_compaction.py."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvrelay.errors import UnavailableError
from kvrelay.types import Tier
from kvstore import record
from kvstore.block import BlockInfo, namespace_key
from kvstore.disk import Changes, DiskFailedError, DiskTier
from kvstore.listing import HeldBlock, Progress
from kvstore.quotas import Quotas
from kvstore.selector import Selector
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put, put_chain, where
from tests.support.store_blocks import NAMESPACE, SLAB_BYTES, block_of, chain_of, hash_of, info_of, key_of

NONE, MEMORY, DISK = Tier.NONE, Tier.MEMORY, Tier.DISK


def on_disk(store: Store) -> set[bytes]:
    """By the file itself."""
    assert store._disk is not None
    with store._disk._env.begin() as txn, txn.cursor() as cursor:
        return {key for key, _ in cursor if len(key) == 48}


def rot_on_disk(store: Store, number: int) -> None:
    assert store._disk is not None
    rotten = bytearray(record.pack(key_of(number), block_of(number)))
    rotten[1_000] ^= 4
    with store._disk._env.begin(write=True) as txn:
        txn.put(key_of(number), bytes(rotten))


# Pins


@pytest.mark.parametrize("memory_blocks", [4, 0], ids=["memory", "disk"])
async def test_a_pinned_chain_outlives_a_flood_until_its_time(tmp_path: Path, memory_blocks: int) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=memory_blocks, disk_bytes=1 << 20, clock=clock) as store:
        await put_chain(store, 1, 2)
        assert store.pin([key_of(1), key_of(2), key_of(3)], 60.0) == 2
        await put(store, *range(100, 300))
        assert NONE not in where(store, 1, 2)
        assert store.stats().num_pinned == 2
        clock.now = 61.0
        await put(store, *range(300, 500))
        assert where(store, 1, 2) == [NONE, NONE]


async def test_a_pin_outlives_time_to_live_and_restart_and_ends_by_0(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, since_boot=lambda: 0.0) as store:
        await put_chain(store, 1, 2, ttl_s=5.0)
        store.pin([key_of(2)], 100.0)
    async with opened(tmp_path, clock=clock, since_boot=lambda: 50.0) as store:
        clock.now = 49.0
        assert where(store, 1, 2) == [DISK, DISK]
        assert [round(held.pinned_s) for held in store.list() if held.info.key == key_of(2)] == [1]
        store.pin([key_of(2)], 0.0)
        assert where(store, 1, 2) == [NONE, NONE]


async def test_a_block_that_is_pinned_on_its_way_to_disk_is_pinned_there(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0, disk_bytes=1 << 20) as store:
        await put(store, 1, flush=False)
        assert store.pin([key_of(1)], 60.0) == 1
        assert [held.pinned_s for held in store.list()] == [60.0]
        await put(store, *range(100, 300))
        assert where(store, 1) == [DISK]


# Deletes


@pytest.mark.parametrize(
    ("selector", "left"),
    [
        (Selector(), []),
        (Selector(tenant="a"), [4]),
        (Selector(tenant="b"), [1, 2, 3, 5]),
        (Selector(block_hash=hash_of(2)), [1, 4, 5]),
        (Selector(block_hash=hash_of(2), tenant="b"), [1, 2, 3, 4, 5]),
        (Selector(namespace=NAMESPACE), [5]),
        (Selector(namespace=NAMESPACE[:8]), []),
        (Selector(namespace=b"x" * 16), [1, 2, 3, 4, 5]),
        (Selector(unused_s=15.0), [1]),
        (Selector(unused_s=25.0), [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("memory_blocks", [100, 2, 0])
async def test_what_is_deleted_misses_at_once_and_is_off_the_disk(
    tmp_path: Path, selector: Selector, left: list[int], memory_blocks: int
) -> None:
    """1-2-3 are a chain of tenant a, 4 is tenant b's, 5 is a's of the same model in another layout."""
    clock = ManualClock(0.0)
    other = namespace_key("m" * 64, "other")
    fifth = BlockInfo(other + hash_of(5), other + bytes(32), 0, "a", 0.0)
    keys = {number: key_of(number) for number in (1, 2, 3, 4)} | {5: fifth.key}
    async with opened(tmp_path, memory_blocks=memory_blocks, clock=clock) as store:
        await put_chain(store, 1, 2, 3, tenant="a")
        await put(store, 4, tenant="b")
        await store.put(fifth, block_of(5))
        await store.flush(FLUSH_S)
        clock.now = 20.0
        await get(store, 1)
        deleted = await store.delete(selector)
        assert {number for number, key in keys.items() if store.match([key]) != [NONE]} == set(left)
        assert deleted == (5 - len(left), (5 - len(left)) * SLAB_BYTES)
        assert on_disk(store) == {keys[number] for number in left}
        store._memory.check()


async def test_pinned_blocks_are_deleted_all_the_same(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put_chain(store, 1, 2)
        store.pin([key_of(1), key_of(2)], 1_000.0)
        assert await store.delete(Selector(block_hash=hash_of(1))) == (2, 2 * SLAB_BYTES)
        assert store.stats().num_pinned == 0


async def test_what_is_on_its_way_to_disk_never_gets_there(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(20), flush=False, tenant="a")
        await put(store, 50, flush=False, tenant="b")
        assert await store.delete(Selector(tenant="a")) == (20, 20 * SLAB_BYTES)
        assert len(await get(store, 50)) == 1
        await store.flush(FLUSH_S)
        assert store._writer is not None
        await store._writer.settle()
        assert on_disk(store) == {key_of(50)}
        assert await put(store, 3) == [PutOutcome.STORED]
        assert on_disk(store) == {key_of(3), key_of(50)}


class HesitantDisk(DiskTier):
    """Looks at the device only while `gate` is open: the batch has been taken by then, and has no place yet."""

    gate = threading.Event()

    def may_grow(self, headroom_bytes: int) -> bool:
        assert self.gate.wait(FLUSH_S)
        return super().may_grow(headroom_bytes)


async def test_a_block_that_is_deleted_as_its_transaction_begins_does_not_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path, make_disk=HesitantDisk) as store:
        HesitantDisk.gate.clear()
        await put(store, 1, flush=False)
        await asyncio.sleep(0)
        assert store._writer is not None
        assert not store._writer.pending.has_queued()
        deleting = asyncio.create_task(store.delete(Selector()))
        await asyncio.sleep(0)
        HesitantDisk.gate.set()
        assert await deleting == (1, SLAB_BYTES)
        await store.flush(FLUSH_S)
        assert where(store, 1) == [NONE]
        assert on_disk(store) == set()
        assert store.stats().disk.num_blocks == 0


@pytest.mark.parametrize("memory_blocks", [2, 0])
async def test_what_follows_is_deleted_on_its_way_to_disk_too(tmp_path: Path, memory_blocks: int) -> None:
    """The first is on disk, the others are pending; memory has the last two, or none."""
    async with opened(tmp_path, memory_blocks=memory_blocks) as store:
        await put_chain(store, 1)
        assert store._writer is not None
        async with store._writer.paused():
            await put_chain(store, 1, 2, 3, 4, flush=False)
            deleting = asyncio.create_task(store.delete(Selector(block_hash=hash_of(1))))
            await asyncio.sleep(0)
            assert where(store, 1, 2, 3, 4) == [NONE] * 4
        assert await deleting == (4, 4 * SLAB_BYTES)
        await store.flush(FLUSH_S)
        assert on_disk(store) == set()


async def test_what_follows_is_deleted_through_all_tiers_whosever_it_is(tmp_path: Path) -> None:
    """1 is in both tiers, 2 on disk alone, and 3, which the disk refused, in memory alone."""
    async with opened(tmp_path) as store:
        await put(store, 1, tenant="a")
        for number in (2, 3):
            info = info_of(number, after=number - 1, index=number - 1, tenant="b")
            assert await store.put(info, block_of(number)) is PutOutcome.STORED
        await store.flush(FLUSH_S)
        store._memory.discard(key_of(2))
        assert store._memory.add(info, block_of(3), 0.0)
        assert store._writer is not None
        store._writer.drop([key_of(3)])
        assert where(store, 1, 2, 3) == [MEMORY, DISK, MEMORY]
        assert await store.delete(Selector(tenant="a")) == (3, 3 * SLAB_BYTES)
        assert where(store, 1, 2, 3) == [NONE] * 3


class DeafDisk(DiskTier):
    """Refuses every transaction while `deaf`."""

    deaf = False

    def write(self, changes: Changes) -> None:
        if self.deaf:
            raise DiskFailedError("Read-only file system")
        super().write(changes)


async def test_a_delete_that_the_disk_does_not_take_is_told_and_done_later(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, make_disk=DeafDisk, clock=clock) as store:
        await put(store, 1, 2)
        disk = store._disk
        assert isinstance(disk, DeafDisk)
        disk.deaf = True
        with pytest.raises(UnavailableError, match="the disk does not take the deletion now"):
            await store.delete(Selector(block_hash=hash_of(1)))
        assert where(store, 1, 2) == [NONE, MEMORY]
        assert not store.stats().disk_writing
        disk.deaf, clock.now = False, 6.0
        store._upkeep.tick()
        assert store._writer is not None
        while store._writer._doomed:
            await store._writer._wait_for_progress()
        assert on_disk(store) == {key_of(2)}
        assert store.stats().disk_writing


# Lists


async def test_a_list_tells_of_every_block_what_is_known(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=1, clock=clock) as store:
        await put_chain(store, 1, 2, tenant="a", ttl_s=60.0)
        await put(store, 3, tenant="b")
        store.pin([key_of(3)], 30.0)
        clock.now = 10.0
        first, second = chain_of(1, 2, tenant="a", ttl_s=60.0)
        held = {one.info.key: one for one in store.list()}
        assert held == {
            key_of(1): HeldBlock(first, DISK, SLAB_BYTES, 10.0, 50.0, 0.0),
            key_of(2): HeldBlock(second, DISK, SLAB_BYTES, 10.0, 50.0, 0.0),
            key_of(3): HeldBlock(info_of(3, tenant="b"), MEMORY, SLAB_BYTES, 10.0, None, 20.0),
        }
        assert {one.info.key for one in store.list(tenant="b")} == {key_of(3)}
        assert list(store.list(namespace=b"y" * 8)) == []


async def test_a_list_goes_on_while_blocks_come_and_go() -> None:
    async with opened(None) as store:
        await put(store, *range(50))
        seen = 0
        for held in store.list():
            seen += 1
            if seen == 10:
                await store.delete(Selector(tenant="default"))
                await put(store, 100)
            assert held.num_bytes == SLAB_BYTES
        assert seen == 10


async def test_stats_tell_what_each_tenant_holds_and_may(tmp_path: Path) -> None:
    quotas = Quotas(0, {"a": 4 * SLAB_BYTES})
    async with opened(tmp_path, memory_quotas=quotas, disk_quotas=quotas) as store:
        await put(store, *range(6), tenant="a")
        await put(store, *range(10, 18), tenant="b")
        largest, second = store.stats().tenants
        assert (largest.tenant, largest.memory_bytes, largest.memory_quota_bytes) == ("b", 8 * SLAB_BYTES, 0)
        assert (second.tenant, second.memory_bytes, second.memory_quota_bytes) == ("a", 4 * SLAB_BYTES, 4 * SLAB_BYTES)
        assert second.disk_bytes <= second.disk_quota_bytes == 4 * SLAB_BYTES


# Proofs


async def test_verify_finds_what_rotted_and_drops_it_and_what_follows(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(100, 140))
        await put_chain(store, 1, 2, 3)
        rot_on_disk(store, 2)
        steps = [progress async for progress in store.verify()]
        assert steps[0] == Progress(0, 43)
        assert steps[-1] == Progress(43, 43, num_corrupt=1)
        assert [step.num_done for step in steps] == sorted({step.num_done for step in steps})
        assert where(store, 1, 2, 3) == [DISK, NONE, NONE]
        assert store.stats().corrupt == 1
        assert (await put_chain(store, 1, 2, 3))[1:] == [PutOutcome.STORED] * 2


async def test_verify_counts_a_record_that_is_not_where_it_was_written(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, 1, 2)
        assert store._disk is not None
        with store._disk._env.begin(write=True) as txn:
            txn.delete(key_of(1))
        assert [progress async for progress in store.verify()][-1] == Progress(2, 2, num_corrupt=1)
        assert where(store, 1, 2) == [NONE, DISK]


async def test_verify_goes_on_while_blocks_come_and_go(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(60))
        async for progress in store.verify():
            await store.delete(Selector(block_hash=hash_of(50)))
            await put(store, 1_000 + progress.num_done)
        assert (progress.num_done, progress.num_corrupt) == (60, 0)
        assert where(store, 50, 1_000) == [NONE, DISK]
