"""Which blocks the disk gets under each write policy, and what a tier refuses."""

from pathlib import Path

import pytest

from kvrelay.types import Tier
from kvstore.disk import Changes, DiskFailedError, DiskTier
from kvstore.entry import Entry
from kvstore.pending import PendingBlock
from kvstore.placement import WritePolicy
from kvstore.quotas import Quotas
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put, put_chain, where
from tests.support.store_blocks import SLAB_BYTES, block_of, info_of, key_of

NONE, MEMORY, DISK = Tier.NONE, Tier.MEMORY, Tier.DISK
STORED, PRESENT, REFUSED = PutOutcome.STORED, PutOutcome.PRESENT, PutOutcome.REFUSED
BACK = {"write_policy": WritePolicy.BACK}
REUSE = {"write_policy": WritePolicy.REUSE}


def on_disk(store: Store, *numbers: int) -> list[bool]:
    assert store._writer is not None
    return [key_of(number) in store._writer.books.index for number in numbers]


async def test_through_writes_as_blocks_come(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await put_chain(store, 1, 2)
        assert on_disk(store, 1, 2) == [True, True]


async def test_back_writes_a_chain_from_its_root_when_its_tail_leaves_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=3, **BACK) as store:
        assert await put_chain(store, 1, 2, 3) == [STORED] * 3
        assert on_disk(store, 1, 2, 3) == [False] * 3
        await put(store, 9)
        assert on_disk(store, 1, 2, 3, 9) == [True, True, True, False]
        assert await get(store, 1, 2, 3) == [MEMORY, MEMORY, DISK]


async def test_back_writes_the_rest_at_the_end(tmp_path: Path) -> None:
    async with opened(tmp_path, **BACK) as store:
        await put_chain(store, 1, 2, 3)
        await store.drain(FLUSH_S)
    async with opened(tmp_path, **BACK) as store:
        assert await get(store, 1, 2, 3) == [DISK] * 3


async def test_back_does_not_write_what_has_expired(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=2, clock=clock, **BACK) as store:
        await put(store, 1, 2, ttl_s=5.0)
        clock.now = 6.0
        await put(store, 3, 4)
        assert on_disk(store, 1, 2) == [False, False]


async def test_back_without_memory_writes_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=0, **BACK) as store:
        assert await put_chain(store, 1, 2) == [STORED] * 2
        assert on_disk(store, 1, 2) == [True, True]


async def test_reuse_writes_what_was_served_often_enough_after_those_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path, reuse_hits=2, **REUSE) as store:
        await put_chain(store, 1, 2, 3)
        await get(store, 1, 2)
        await store.flush(FLUSH_S)
        assert on_disk(store, 1, 2, 3) == [False] * 3
        await get(store, 1, 2, 3)
        await store.flush(FLUSH_S)
        assert on_disk(store, 1, 2, 3) == [True, True, False]
        await store.drain(FLUSH_S)
    async with opened(tmp_path, **REUSE) as store:
        assert await get(store, 1, 2, 3) == [DISK] * 2


async def test_reuse_leaves_the_disk_alone_when_what_nobody_wanted_goes(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=3, **REUSE) as store:
        await put(store, *range(20))
        assert store.stats().disk.num_blocks == 0


async def test_places_that_are_never_used_again_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First blocks are served again and again, second ones never: these stop going to disk, pinned ones apart."""
    for name, value in (("MIN_STORED", 8), ("EPOCH", 32), ("EXPLORE", 0)):
        monkeypatch.setattr(f"kvstore.reuse.{name}", value)
    async with opened(tmp_path, min_reuse=0.2) as store:
        for first in range(0, 32, 2):
            await put_chain(store, first, first + 1)
            await get(store, first)
        await put_chain(store, 100, 101)
        assert where(store, 100, 101) == [MEMORY, MEMORY]
        assert on_disk(store, 100, 101) == [True, False]
        assert store.stats().not_worth == 1


@pytest.mark.parametrize("memory_blocks", [100, 0])
async def test_a_block_whose_parent_is_not_held_is_refused(tmp_path: Path, memory_blocks: int) -> None:
    async with opened(tmp_path, memory_blocks=memory_blocks) as store:
        orphan = info_of(2, after=1, index=1)
        assert await store.put(orphan, block_of(2)) is REFUSED
        assert store.stats().refused == 1
        await put(store, 1)
        assert await store.put(orphan, block_of(2)) is STORED


@pytest.mark.parametrize("memory_blocks", [100, 0])
async def test_blocks_that_claim_a_wrong_place_are_refused_and_stop_nobody(tmp_path: Path, memory_blocks: int) -> None:
    """Said wrongly, or to do harm: a place before that of what it follows, a block after itself, a circle."""
    async with opened(tmp_path, memory_blocks=memory_blocks) as store:
        await put_chain(store, 1, 2)
        for after, index in ((2, 1), (2, 0), (3, 1)):
            assert await store.put(info_of(3, after=after, index=index), block_of(3)) is REFUSED
        assert await store.put(info_of(1, after=2, index=2), block_of(1)) is REFUSED
        assert await store.put(info_of(3, after=2, index=2), block_of(3)) is STORED
        await store.flush(FLUSH_S)
        assert on_disk(store, 1, 2, 3) == [True] * 3
        assert store.stats().disk_writing


async def test_whoever_puts_a_block_again_does_not_make_it_his(tmp_path: Path) -> None:
    async with opened(tmp_path, make_disk=DeafDisk, clock=ManualClock(0.0)) as store:
        assert isinstance(store._disk, DeafDisk)
        await put(store, 1, tenant="a", ttl_s=60.0)
        await put(store, 1, tenant="b", ttl_s=1.0)
        assert [(held.info.tenant, held.info.ttl_s) for held in store.list()] == [("a", 60.0)]


class DeafDisk(DiskTier):
    """Refuses every transaction while `deaf`."""

    deaf = False

    def write(self, changes: Changes) -> None:
        if self.deaf:
            raise DiskFailedError("Input/output error")
        super().write(changes)


async def test_a_block_is_written_after_those_before_it_that_the_disk_refused_at_their_time(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, make_disk=DeafDisk, clock=clock) as store:
        assert isinstance(store._disk, DeafDisk)
        store._disk.deaf = True
        await put_chain(store, 1, 2)
        assert on_disk(store, 1, 2) == [False, False]
        store._disk.deaf, clock.now = False, 6.0
        await put(store, 9)  # the trial
        assert await store.put(info_of(3, after=2, index=2), block_of(3)) is STORED
        await store.flush(FLUSH_S)
        assert on_disk(store, 1, 2, 3) == [True] * 3


async def test_the_disk_takes_no_block_without_its_parent_and_a_start_drops_those_it_finds(tmp_path: Path) -> None:
    orphan = info_of(2, after=1, index=1)
    async with opened(tmp_path) as store:
        assert store._writer is not None
        assert store._disk is not None
        await store._writer.add(PendingBlock(orphan, block_of(2), 0.0, 0.0))
        await store.flush(FLUSH_S)
        assert on_disk(store, 2) == [False]
        assert store.stats().refused == 1
        store._disk.write(Changes(blocks=[(Entry(orphan, SLAB_BYTES, 0.0), block_of(2))]))
    async with opened(tmp_path) as store:
        assert where(store, 2) == [NONE]
        assert store._writer is not None
        assert await store._writer.settle()
        assert store._disk is not None
        assert store._disk.scan().entries == []


async def test_what_follows_a_block_that_leaves_the_disk_leaves_memory_where_it_is_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, memory_blocks=4) as store:
        await put_chain(store, 1, 2)
        await put(store, 10, 11, 12, 13)
        assert where(store, 1, 2) == [DISK, DISK]
        assert await store.put(info_of(3, after=2, index=2), block_of(3)) is STORED
        await store.flush(FLUSH_S)
        assert where(store, 3) == [MEMORY]
        store._upkeep.drop_from_disk([key_of(1)])
        assert where(store, 1, 2, 3) == [NONE] * 3
        store._memory.check()


async def test_what_follows_a_block_that_the_disk_refuses_in_its_turn_leaves_memory_too(tmp_path: Path) -> None:
    """The first waits for the disk alone, memory has the second one, and a pin leaves no room for either on disk."""
    async with opened(tmp_path, memory_blocks=3, disk_quotas=Quotas(8_192)) as store:
        await put(store, 5)
        store.pin([key_of(5)], 1e9)
        assert store._writer is not None
        async with store._writer.paused():
            await put(store, 1, 8, 9, flush=False)
            assert await store.put(info_of(2, after=1, index=1), block_of(2)) is STORED
            assert [key_of(number) in store._memory for number in (1, 2)] == [False, True]
            assert where(store, 1, 2) == [MEMORY, MEMORY]
        await store.flush(FLUSH_S)
        assert where(store, 1, 2, 9) == [NONE, NONE, MEMORY]


async def test_quotas_hold_on_both_tiers_and_cost_the_tenant_its_own(tmp_path: Path) -> None:
    memory_quotas, disk_quotas = Quotas(0, {"a": 2 * SLAB_BYTES}), Quotas(0, {"a": 3 * 8_192})
    async with opened(tmp_path, memory_quotas=memory_quotas, disk_quotas=disk_quotas) as store:
        await put(store, *range(100, 110), tenant="b")
        await put(store, 1, 2, 3, 4, 5, tenant="a")
        assert where(store, *range(100, 110)) == [MEMORY] * 10
        assert where(store, 1, 2, 3, 4, 5) == [NONE, NONE, DISK, MEMORY, MEMORY]
        assert on_disk(store, *range(100, 110)) == [True] * 10


async def test_a_block_beyond_every_quota_is_refused_and_counted(tmp_path: Path) -> None:
    quotas = Quotas(SLAB_BYTES - 1)
    async with opened(tmp_path, memory_quotas=quotas, disk_quotas=quotas) as store:
        assert await put(store, 1) == [REFUSED]
        assert where(store, 1) == [NONE]
        assert (store.stats().refused, store.stats().write_failures) == (2, 0)  # once by each tier


async def test_what_was_used_last_stays_first_after_a_restart_too(tmp_path: Path) -> None:
    """Two kill-less restarts: the order of use, not of writing, decides what a full disk drops."""
    clock = ManualClock(0.0)
    options = {"memory_blocks": 0, "disk_bytes": 1 << 20, "clock": clock, "since_boot": lambda: 0.0}
    async with opened(tmp_path, **options) as store:
        await put(store, *range(90))
        for _ in range(3):
            clock.now += 1.0
            for number in range(10):
                await get(store, number)
        hits = {number: store._writer.books.index.hits(key_of(number)) for number in (0, 50)}  # type: ignore[union-attr]
        assert hits == {0: 3, 50: 0}
    async with opened(tmp_path, **options) as store:
        index = store._writer.books.index  # type: ignore[union-attr]
        assert {number: index.hits(key_of(number)) for number in (0, 50)} == hits
        assert round(index.last_used(key_of(0)) - index.last_used(key_of(50))) == 3
        await put(store, *range(200, 250))
        assert where(store, *range(10)) == [DISK] * 10


async def test_uses_are_written_down_in_batches_not_one_by_one(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, memory_blocks=0, clock=clock) as store:
        await put(store, *range(20))
        assert store._disk is not None
        written = []
        store._disk.write = lambda changes: written.append(len(changes.entries))  # type: ignore[method-assign]
        for _ in range(5):
            await get(store, *range(20))
        store._upkeep.tick()
        assert written == []
        clock.now = 10.0
        store._upkeep.tick()
        await store._writer._wait_for_progress()  # type: ignore[union-attr]
        assert written == [20]
