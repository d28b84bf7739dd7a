import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.types import Tier
from kvstore import record
from kvstore.block import StoredBlock, namespace_key
from kvstore.disk import MIN_DISK_BYTES, Changes, DiskDamagedError, DiskFullError, DiskTier
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put
from tests.support.store_blocks import SLAB_BYTES, block_of, chain_of, info_of, key_of

STORED, PRESENT, REFUSED = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.REFUSED


async def test_a_block_is_stored_once_and_then_present(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert await put(store, 1, 2, 1) == [STORED, STORED, PRESENT]
        assert await get(store, 1, 2) == [Tier.MEMORY, Tier.MEMORY]
        assert store.stats().disk.num_blocks == 2


async def test_get_ends_at_the_first_block_that_is_not_here() -> None:
    async with opened(None) as store:
        await put(store, 1, 2, 4, 5, 6, 7)
        assert len(await get(store, 1, 2, 3, 4, 5, 6, 7)) == 2
        stats = store.stats()
        assert (stats.memory.hits, stats.misses) == (2, 1)


async def test_match_reports_the_tier_of_each_block(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=2) as store:
        await put(store, 1, 2, 3)
        assert store.match([key_of(n) for n in (1, 2, 9, 3)]) == [Tier.DISK, Tier.MEMORY, Tier.NONE, Tier.MEMORY]


async def test_a_foreign_namespace_never_hits(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, 1)
        for foreign in (namespace_key("m" * 64, "L" * 64), namespace_key("M" * 64, "l" * 64)):
            key = key_of(1, foreign)
            assert store.match([key]) == [Tier.NONE]
            assert [found async for found in store.get([key])] == []


async def test_a_restart_finds_the_blocks_on_disk_and_promotes_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, 1, 2, 3)
    async with opened(tmp_path) as store:
        assert await get(store, 1, 2, 3) == [Tier.DISK] * 3
        assert await get(store, 1, 2, 3) == [Tier.MEMORY] * 3
        assert store.stats().disk.hits == store.stats().memory.hits == 3


async def test_a_corrupt_put_is_refused_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        broken = StoredBlock(block_of(1).payload, block_of(2).checksum)
        assert await store.put(info_of(1), broken) is REFUSED
        assert store.match([key_of(1)]) == [Tier.NONE]
        assert store.stats().corrupt == 1


async def test_a_value_that_rots_on_disk_is_a_miss_counted_and_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, 1, 2, 3)
        assert store._disk is not None
        rotten = bytearray(record.pack(key_of(2), block_of(2)))
        rotten[1_000] ^= 4
        with store._disk._env.begin(write=True) as txn:
            txn.put(key_of(2), bytes(rotten))
        assert await get(store, 1, 2, 3) == [Tier.DISK]
        stats = store.stats()
        assert (stats.corrupt, stats.misses, stats.disk.num_blocks) == (1, 1, 2)
        assert await put(store, 2) == [STORED]
        assert await get(store, 1, 2, 3) == [Tier.DISK] * 3
        assert store._disk.read(key_of(2)) == block_of(2)


def rot_in_memory(store: Store, number: int) -> None:
    resident = store._memory.get(key_of(number))
    assert resident is not None
    arena = store._memory._arena._map
    assert arena is not None
    arena[resident.offset] ^= 1


async def test_bytes_that_rot_in_memory_fall_back_to_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, 1)
        rot_in_memory(store, 1)
        assert await get(store, 1) == [Tier.DISK]
        assert store.stats().corrupt == 1


async def test_bytes_that_rot_in_memory_are_dropped() -> None:
    async with opened(None) as store:
        await put(store, 1)
        rot_in_memory(store, 1)
        assert await get(store, 1) == []
        assert store.match([key_of(1)]) == [Tier.NONE]
        assert (store.stats().corrupt, store.stats().memory.num_blocks) == (1, 0)


async def test_memory_stays_within_its_bound_and_drops_a_chains_tail_first() -> None:
    async with opened(None, memory_blocks=4) as store:
        for info, number in zip(chain_of(1, 2, 3, 4), (1, 2, 3, 4), strict=True):
            await store.put(info, block_of(number))
        await put(store, 5, 6)
        assert await get(store, 1, 2, 3) == [Tier.MEMORY] * 2
        stats = store.stats().memory
        assert (stats.num_blocks, stats.num_bytes, stats.evictions) == (4, 4 * SLAB_BYTES, 2)


async def test_a_block_larger_than_every_tier_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=1, disk_bytes=MIN_DISK_BYTES) as store:
        assert await store.put(info_of(1), block_of(1, MIN_DISK_BYTES)) is REFUSED
        assert store.match([key_of(1)]) == [Tier.NONE]


@pytest.mark.parametrize("sizes", [[SLAB_BYTES], [1_000, SLAB_BYTES, 30_000]])
async def test_the_disk_bound_holds_under_churn(tmp_path: Path, sizes: list[int]) -> None:
    """Five times what fits passes through; the file never exceeds its bound, nothing fails, the newest are there."""
    async with opened(tmp_path, memory_blocks=0, disk_bytes=2 << 20) as store:
        number, num_bytes = 0, 0
        while num_bytes < 5 * (2 << 20):
            block = block_of(number, sizes[number % len(sizes)])
            assert await store.put(info_of(number), block) is STORED
            number, num_bytes = number + 1, num_bytes + block.num_bytes
            if number % 8 == 0:
                await store.flush(FLUSH_S)
                assert (tmp_path / "data.mdb").stat().st_size <= 2 << 20
        await store.flush(FLUSH_S)
        stats = store.stats()
        assert stats.write_failures == 0
        assert stats.disk.evictions > 0
        assert stats.disk.num_bytes <= stats.disk.capacity_bytes
        async for block, _ in store.get([key_of(number - 1)]):
            assert block.payload == block_of(number - 1, sizes[(number - 1) % len(sizes)]).payload
        assert store.stats().disk.hits == 1


class FullDisk(DiskTier):
    """Refuses transactions that write blocks while `num_full` lasts."""

    num_full = 0
    num_rooms = 0

    def write(self, changes: Changes) -> None:
        if changes.blocks and self.num_full > 0:
            self.num_full -= 1
            raise DiskFullError("No space left on device")
        super().write(changes)

    def make_room(self, deletes: Sequence[bytes]) -> None:
        self.num_rooms += 1
        super().make_room(deletes)


async def test_a_full_file_leads_to_eviction(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0, make_disk=FullDisk) as store:
        await put(store, 1, 2, 3, 4)
        disk = store._disk
        assert isinstance(disk, FullDisk)
        disk.num_full = 1
        assert await put(store, 5) == [STORED]
        assert await get(store, 5) == [Tier.DISK]
        assert await get(store, 3, 4) == [Tier.DISK] * 2
        assert store.match([key_of(1), key_of(2)]) == [Tier.NONE] * 2
        assert (store.stats().write_failures, store.stats().disk.evictions, disk.num_rooms) == (0, 2, 1)


class CrowdedDisk(DiskTier):
    """On a device that others have nearly filled."""

    def may_grow(self, headroom_bytes: int) -> bool:
        return False


async def test_a_nearly_full_device_is_not_filled_up(tmp_path: Path) -> None:
    """New blocks take the place of old ones while there still is room to delete."""
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(50))
    async with opened(tmp_path, memory_blocks=0, make_disk=CrowdedDisk) as store:
        for number in range(100, 300, 5):
            await put(store, *range(number, number + 5))
        assert store.stats().disk.num_blocks == 50
        assert store.stats().write_failures == 0
        assert (tmp_path / "data.mdb").stat().st_size < 1 << 20
        assert await get(store, *range(290, 300)) == [Tier.DISK] * 10


async def test_a_disk_that_stays_full_is_read_but_not_written_until_a_later_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=1, make_disk=FullDisk, clock=clock) as store:
        await put(store, *range(20))
        disk = store._disk
        assert isinstance(disk, FullDisk)
        disk.num_full = 1_000
        await put(store, 100)
        await put(store, 101)
        assert store.stats().write_failures == 2
        assert disk.num_full == 1_000 - 3  # the first block's three tries; the second was not tried at all
        assert caplog.text.count("stops writing for now, reading goes on: No space left on device") == 1
        assert store.match([key_of(100), key_of(101)]) == [Tier.NONE, Tier.MEMORY]
        assert await get(store, 18, 19) == [Tier.DISK] * 2
        disk.num_full, clock.now = 0, 6.0
        await put(store, 102)
        await put(store, 103)
        assert store.match([key_of(102), key_of(103)]) == [Tier.DISK, Tier.MEMORY]
        assert store.stats().write_failures == 2


class DamagedDisk(DiskTier):
    """Finds its own pages damaged by the next write of a block."""

    damaged = False

    def write(self, changes: Changes) -> None:
        if self.damaged and changes.blocks:
            self.damaged = False
            raise DiskDamagedError("Located page was wrong type")
        super().write(changes)


async def test_a_damaged_file_is_started_over_and_what_is_in_memory_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, memory_blocks=10, make_disk=DamagedDisk) as store:
        await put(store, *range(50))
        assert isinstance(store._disk, DamagedDisk)
        store._disk.damaged = True
        await put(store, 100)
        stats = store.stats()
        assert (stats.disk.num_blocks, stats.memory.num_blocks, stats.wipes) == (0, 10, 1)
        assert "starts empty" in caplog.text
        assert await get(store, 49, 100) == [Tier.MEMORY] * 2
        assert await put(store, 0, 100) == [STORED, PRESENT]
        assert store.stats().disk.num_blocks == 2
        assert store.stats().disk_writing


class SlowDisk(DiskTier):
    """Writes blocks only while `gate` is open."""

    gate = threading.Event()

    def write(self, changes: Changes) -> None:
        assert self.gate.wait(20)
        super().write(changes)


async def test_a_put_waits_for_a_slow_disk_so_that_the_queue_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.writer.MAX_PENDING_BYTES", 3 * SLAB_BYTES)
    SlowDisk.gate.clear()
    async with opened(tmp_path, make_disk=SlowDisk) as store:
        await put(store, 1, 2, 3, flush=False)
        waiting = asyncio.create_task(put(store, 4, flush=False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        SlowDisk.gate.set()
        assert await waiting == [STORED]
        await store.flush(FLUSH_S)
        assert (store.stats().disk.num_blocks, store.stats().write_failures) == (4, 0)


async def test_a_put_goes_on_without_a_disk_that_is_too_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.writer.MAX_PENDING_BYTES", SLAB_BYTES)
    monkeypatch.setattr("kvstore.writer.ROOM_WAIT_S", 0.05)
    SlowDisk.gate.clear()
    async with opened(tmp_path, make_disk=SlowDisk) as store:
        assert await put(store, 1, 2, flush=False) == [STORED, STORED]
        assert store.match([key_of(2)]) == [Tier.MEMORY]
        SlowDisk.gate.set()
        await store.flush(FLUSH_S)
        assert (store.stats().disk.num_blocks, store.stats().write_failures) == (1, 1)


async def test_dead_readers_are_looked_for_from_time_to_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, disk_bytes=MIN_DISK_BYTES, clock=clock) as store:
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert reader.stdout is not None
        await reader.stdout.readline()
        reader.kill()
        await reader.communicate()
        await put(store, 1)
        assert "dead LMDB readers" not in caplog.text
        clock.now += 11
        await put(store, 2)
        assert "cleared 1 dead LMDB readers" in caplog.text


READER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=1 << 20)
with env.begin() as txn:
    print(len(list(txn.cursor())), flush=True)
    sys.stdin.read()
"""


async def test_a_stuck_foreign_reader_stops_writing_and_its_death_lets_it_go_on(tmp_path: Path) -> None:
    """A reader keeps every page it sees; the file fills up in spite of all eviction, until the reader is gone."""
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=0, disk_bytes=MIN_DISK_BYTES, clock=clock) as store:
        await put(store, *range(80))
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, str(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert reader.stdout is not None
        assert int(await reader.stdout.readline()) == 80 + 2  # the clock's mark and the other database's name
        for number in range(100, 400):
            await put(store, number)
        assert store.stats().write_failures > 0
        assert (tmp_path / "data.mdb").stat().st_size <= MIN_DISK_BYTES
        reader.kill()
        await reader.communicate()
        clock.now += 120
        for number in range(400, 700):
            clock.now += 1
            await put(store, number)
        assert await get(store, 699) == [Tier.DISK]


async def test_a_block_on_its_way_to_disk_is_served_after_memory_dropped_it(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=1) as store:
        assert await put(store, 1, 2, 3, flush=False) == [STORED] * 3
        assert await get(store, 1, 2, 3) == [Tier.MEMORY] * 3


async def test_a_get_that_is_left_early_leaves_no_read_behind(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(6))
        found = store.get([key_of(n) for n in range(6)])
        await anext(found)
        await found.aclose()
        await asyncio.sleep(0)
        assert store._reader.threads._work_queue.empty()
