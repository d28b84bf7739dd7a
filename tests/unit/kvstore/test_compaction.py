"""The disk tier's file is written anew while the store serves."""

import asyncio
import hashlib
from pathlib import Path

import lmdb
import pytest

from kvrelay.errors import UnavailableError
from kvrelay.types import Tier
from kvstore import disk
from kvstore.disk import DiskTier
from kvstore.selector import Selector
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put, where
from tests.support.store_blocks import hash_of, key_of

DISK = Tier.DISK


def on_disk(store: Store) -> set[bytes]:
    """By the file itself."""
    assert store._disk is not None
    with store._disk._env.begin() as txn, txn.cursor() as cursor:
        return {key for key, _ in cursor if len(key) == 48}


async def test_compaction_gives_pages_back_and_loses_nothing(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=0, clock=clock) as store:
        await put(store, *range(500))
        for number in range(100, 500):
            await store.delete(Selector(block_hash=hash_of(number)))
        before = (tmp_path / "data.mdb").stat().st_size
        steps = [progress async for progress in store.compact()]
        after = (tmp_path / "data.mdb").stat().st_size
        assert steps[-1].num_freed_bytes == before - after > 3_000_000
        assert steps[-1].num_done == steps[-1].num_total
        assert after < 110 * 8_192
        assert await get(store, *range(100)) == [DISK] * 100
        assert await put(store, 600) == [PutOutcome.STORED]
        assert not (tmp_path / "compact").exists()
    async with opened(tmp_path, memory_blocks=0, clock=clock) as store:
        assert await get(store, *range(100), 600) == [DISK] * 101


async def test_reads_go_on_and_writes_wait_during_compaction(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(50))
        compacting = store.compact()
        await anext(compacting)
        assert await get(store, *range(50)) == [DISK] * 50
        assert await put(store, 100, flush=False) == [PutOutcome.STORED]
        async for _ in compacting:
            assert await get(store, 7) == [DISK]
        await store.flush(FLUSH_S)
        assert where(store, 100) == [DISK]
        assert on_disk(store) == {key_of(n) for n in (*range(50), 100)}


async def test_a_compaction_that_is_left_early_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0) as store:
        await put(store, *range(50))
        compacting = store.compact()
        await anext(compacting)
        await compacting.aclose()
        assert not (tmp_path / "compact").exists()
        await put(store, 100)
        assert await get(store, 7, 100) == [DISK] * 2


class CrowdedDisk(DiskTier):
    def may_grow(self, headroom_bytes: int) -> bool:
        return False


async def test_compaction_says_what_it_lacks(tmp_path: Path) -> None:
    async with opened(None) as store:
        with pytest.raises(UnavailableError, match="no disk tier"):
            await anext(store.compact())
    async with opened(tmp_path, make_disk=CrowdedDisk) as store:
        with pytest.raises(UnavailableError, match="the device has no room for a second file of"):
            await anext(store.compact())
        await asyncio.wait_for(put(store, 1), FLUSH_S)


async def test_a_file_that_cannot_be_opened_again_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fills up meanwhile has no room for LMDB's lock file, say. Nobody may put: all is held already."""
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=0, clock=clock) as store:
        await put(store, *range(20))
        open_file, may_open = disk.open_file, False

        def open_if_it_may(path: Path, disk_bytes: int, *, disposable: bool) -> lmdb.Environment:
            if not may_open:
                raise lmdb.DiskError("no space left")
            return open_file(path, disk_bytes, disposable=disposable)

        monkeypatch.setattr(disk, "open_file", open_if_it_may)
        with pytest.raises(UnavailableError, match="cannot open its file again"):
            async for _ in store.compact():
                pass
        assert await get(store, 7) == []
        store._upkeep.tick()
        async with asyncio.timeout(FLUSH_S):
            while store.counts().disk_writing:
                await asyncio.sleep(0.01)
        may_open = True
        clock.now += 60.0
        store._upkeep.tick()
        async with asyncio.timeout(FLUSH_S):
            while not store.counts().disk_writing:
                await asyncio.sleep(0.01)
        assert await get(store, *range(20)) == [DISK] * 20


async def test_what_a_dead_process_left_of_a_compaction_is_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put(store, 1)
    (tmp_path / "compact").mkdir()
    (tmp_path / "compact" / "data.mdb").write_bytes(hashlib.sha256(b"").digest())
    async with opened(tmp_path) as store:
        assert await get(store, 1) == [DISK]
    assert not (tmp_path / "compact").exists()
