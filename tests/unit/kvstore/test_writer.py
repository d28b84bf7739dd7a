"""Who puts while the disk takes nothing: how long that takes, and what a delete means for it."""

import asyncio
import time
from pathlib import Path

import pytest

from kvrelay.types import Tier
from kvstore.placement import WritePolicy
from kvstore.selector import Selector
from tests.support.open_store import FLUSH_S, opened, put, put_chain, where
from tests.support.store_blocks import SLAB_BYTES, hash_of, key_of

pytestmark = pytest.mark.usefixtures("short_queue")


@pytest.fixture
def short_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.writer.MAX_PENDING_BYTES", 2 * SLAB_BYTES)


async def test_one_waits_for_a_disk_that_takes_nothing_and_the_others_go_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node gives a Put of 32 blocks up after less than three seconds, and then leaves the store alone."""
    monkeypatch.setattr("kvstore.writer.ROOM_WAIT_S", 0.2)
    async with opened(tmp_path) as store:
        assert store._writer is not None
        wait, waits_s = store._writer._wait_for_progress, []

        async def timed_wait() -> None:
            started = time.monotonic()
            try:
                await wait()
            finally:
                waits_s.append(time.monotonic() - started)

        async with store._writer.paused():
            with monkeypatch.context() as patch:
                patch.setattr(store._writer, "_wait_for_progress", timed_wait)
                await put(store, *range(12), flush=False)
            assert len(waits_s) == 1
            assert waits_s[0] > 0.19
            assert where(store, *range(12)) == [Tier.MEMORY] * 12
            assert store.stats().write_failures == 10
        await store.flush(FLUSH_S)
        await put(store, *range(20, 30))
        assert store.stats().write_failures == 10


async def test_what_is_deleted_while_it_waits_for_room_does_not_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert store._writer is not None
        async with store._writer.paused():
            await put(store, 1, 2, flush=False)
            putting = asyncio.create_task(put_chain(store, 3, 4, flush=False))
            while where(store, 3) == [Tier.NONE]:
                await asyncio.sleep(0)
            deleting = asyncio.create_task(store.delete(Selector(block_hash=hash_of(3))))
            await asyncio.sleep(0)
        await asyncio.gather(putting, deleting)
        await store.flush(FLUSH_S)
        assert where(store, 3, 4) == [Tier.NONE] * 2
        assert set(store._writer.books.index) == {key_of(1), key_of(2)}


async def test_at_the_end_a_slow_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.writer.ROOM_WAIT_S", 0.01)
    async with opened(tmp_path, write_policy=WritePolicy.BACK) as store:
        assert store._writer is not None
        await put(store, *range(12))
        async with store._writer.paused():
            draining = asyncio.create_task(store.drain(FLUSH_S))
            await asyncio.sleep(0.1)
        await draining
        assert len(store._writer.books.index) == 12
        assert store.stats().write_failures == 0
