"""KS-10: a time to live holds in every path, is begun anew by use alone, and outlives restarts and set clocks."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from kvrelay.types import Tier
from kvstore.lifetimes import Lifetimes
from kvstore.placement import WritePolicy
from kvstore.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put, put_chain, where
from tests.support.store_blocks import key_of

TTL_S = 5.0


async def by_match(store: Store) -> int:
    return sum(tier is not Tier.NONE for tier in where(store, 1, 2))


async def by_prefix(store: Store) -> int:
    return len(store.match_prefix([key_of(1), key_of(2)]))


async def by_get(store: Store) -> int:
    return len(await get(store, 1, 2))


async def by_list(store: Store) -> int:
    return len(list(store.list()))


PATHS = pytest.mark.parametrize("path_of", [by_match, by_prefix, by_get, by_list])
Path_ = Callable[[Store], Awaitable[int]]


@PATHS
@pytest.mark.parametrize("memory_blocks", [100, 0], ids=["memory", "disk"])
async def test_a_block_that_is_used_lives_on_and_one_that_is_not_is_gone_at_its_time(
    tmp_path: Path, path_of: Path_, memory_blocks: int
) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, memory_blocks=memory_blocks) as store:
        await put_chain(store, 1, 2, ttl_s=TTL_S)
        clock.now = 4.0
        assert len(await get(store, 1, 2)) == 2
        clock.now = 8.9
        assert await path_of(store) == 2
        if path_of is by_get:
            clock.now = 13.0
            assert await path_of(store) == 2
            clock.now += 5.0
        clock.now += 5.1
        assert await path_of(store) == 0
        assert store.stats().expired == 2


async def test_looking_does_not_keep_a_block_alive() -> None:
    clock = ManualClock(0.0)
    async with opened(None, clock=clock) as store:
        await put(store, 1, ttl_s=TTL_S)
        for tenth in range(200):
            clock.now = tenth / 10
            await by_match(store)
            await by_prefix(store)
            store.stats()
        assert await by_get(store) == 0


async def test_to_put_it_again_is_a_use(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock) as store:
        await put_chain(store, 1, 2, ttl_s=TTL_S)
        clock.now = 4.0
        await put_chain(store, 1, 2, ttl_s=TTL_S)
        clock.now = 8.0
        assert await by_match(store) == 2


@PATHS
@pytest.mark.parametrize(("down_s", "held"), [(1.0, 2), (6.0, 0)])
async def test_a_restart_neither_ends_nor_renews_a_life(
    tmp_path: Path, path_of: Path_, down_s: float, held: int
) -> None:
    """Used at 4, closed at 6, asked after; the wall clock is an hour off by then."""
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, since_boot=lambda: 1_000.0) as store:
        await put_chain(store, 1, 2, ttl_s=TTL_S)
        clock.now = 4.0
        await get(store, 1, 2)
        clock.now = 6.0
    again = ManualClock(500.0)
    options = {"since_boot": lambda: 1_000.0 + down_s, "wall": lambda: 0.0}
    async with opened(tmp_path, clock=again, **options) as store:
        assert await path_of(store) == held


async def test_expired_bytes_leave_the_disk_although_nobody_asks(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock) as store:
        await put_chain(store, 1, 2, ttl_s=TTL_S)
        await put(store, 3)
        clock.now = 5.1
        store._upkeep.tick()
        assert store._writer is not None
        assert store._disk is not None
        assert await store._writer.settle()
        assert {one.info.key for one in store._disk.scan().entries} == {key_of(3)}


async def test_to_be_written_late_is_no_use(tmp_path: Path) -> None:
    """Put at 0, written when it left memory at 4."""
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, memory_blocks=2, write_policy=WritePolicy.BACK) as store:
        await put(store, 1, 2, ttl_s=TTL_S)
        clock.now = 4.0
        await put(store, 3, 4)
        assert where(store, 1, 2) == [Tier.DISK] * 2
        clock.now = 5.1
        assert where(store, 1, 2) == [Tier.NONE] * 2


async def test_to_be_written_at_the_end_is_no_use(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, write_policy=WritePolicy.BACK, since_boot=lambda: 0.0) as store:
        await put(store, 1, ttl_s=TTL_S)
        await put(store, 2)
        clock.now = 4.0
        await store.drain(FLUSH_S)
    async with opened(tmp_path, clock=ManualClock(0.0), since_boot=lambda: 2.0) as store:
        assert where(store, 1, 2) == [Tier.NONE, Tier.DISK]


@pytest.mark.parametrize("memory_blocks", [100, 0], ids=["memory", "disk"])
async def test_a_block_whose_time_is_over_while_it_waits_for_the_disk_is_gone(
    tmp_path: Path, memory_blocks: int
) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, memory_blocks=memory_blocks) as store:
        assert store._writer is not None
        async with store._writer.paused():
            await put(store, 1, 2, 3, 4, flush=False, ttl_s=TTL_S)
            store.pin([key_of(3), key_of(4)], 100.0)
            store.pin([key_of(4)], 0.0)
            clock.now = 4.0
            assert len(await get(store, 2)) == 1
            clock.now = 5.1
            assert where(store, 1, 2, 3, 4) == [Tier.NONE, Tier.MEMORY, Tier.MEMORY, Tier.NONE]
        await store.flush(FLUSH_S)
        assert set(store._writer.books.index) == {key_of(2), key_of(3)}
        assert store.stats().expired == 2


async def test_a_running_store_sees_to_it_by_itself_and_outlives_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore.store.TICK_S", 0.001)
    ticked = asyncio.Event()
    num_ticks = 0

    def tick() -> None:
        nonlocal num_ticks
        num_ticks += 1
        if num_ticks == 1:
            raise RuntimeError("of no importance")
        ticked.set()

    async with opened(None) as store:
        store._upkeep.tick = tick  # type: ignore[method-assign]
        await asyncio.wait_for(ticked.wait(), 10.0)
    assert "upkeep failed; it is tried again" in caplog.text


async def test_a_namespace_that_nobody_uses_ages_out(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, namespace_ttl_s=100.0) as store:
        await put_chain(store, 1, 2)
        clock.now = 90.0
        await get(store, 1)
    async with opened(tmp_path, clock=clock, namespace_ttl_s=100.0, since_boot=lambda: 0.0) as store:
        clock.now = 180.0
        store._upkeep.tick()
        assert await by_match(store) == 2
        clock.now = 191.0
        store._upkeep.tick()
        assert await by_match(store) == 0
        assert store.stats().expired == 2


async def test_a_namespace_of_which_a_block_is_pinned_stays(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    async with opened(tmp_path, clock=clock, namespace_ttl_s=100.0) as store:
        await put(store, 1)
        store.pin([key_of(1)], 150.0)
        clock.now = 101.0
        store._upkeep.tick()
        assert where(store, 1) == [Tier.MEMORY]
        clock.now = 202.0
        store._upkeep.tick()
        assert where(store, 1) == [Tier.NONE]


async def test_a_tenants_own_lifetime_goes_before_the_default() -> None:
    lifetimes = Lifetimes.parse("1h", ["alice=5m", "bob=none"])
    async with opened(None, lifetimes=lifetimes) as store:
        assert [store.default_ttl_s(tenant) for tenant in ("alice", "bob", "carol")] == [300.0, 0.0, 3_600.0]


def test_two_lifetimes_of_one_tenant_are_refused() -> None:
    with pytest.raises(ConfigError, match="'alice' has two lifetimes"):
        Lifetimes.parse("1h", ["alice=5m", "alice=none"])


@pytest.mark.parametrize(("default", "texts"), [("soon", []), ("1h", ["alice"]), ("1h", ["alice=-5"]), ("1h", ["=5m"])])
def test_a_lifetime_that_is_none_is_refused(default: str, texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="is not"):
        Lifetimes.parse(default, texts)
