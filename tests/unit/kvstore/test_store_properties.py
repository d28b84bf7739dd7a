"""Whatever happens to a store, in whatever order: it serves what was put, and its books agree with its tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.types import Tier
from kvstore import record
from kvstore.disk import MIN_DISK_BYTES
from kvstore.placement import WritePolicy
from kvstore.quotas import Quotas
from kvstore.selector import Selector
from kvstore.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.open_store import FLUSH_S, get, opened, put_chain, where
from tests.support.store_blocks import SLAB_BYTES, block_of, hash_of, key_of

CHAIN = 10
TTL_S = 100.0
QUOTAS = Quotas(0, {"b": 30 * 8_192})

chains = st.integers(0, 20)
places = st.integers(1, CHAIN)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "put", "get", "get", "delete", "pin", "rot", "forget"]), chains, places),
        st.tuples(st.sampled_from(["flush", "restart", "wait", "tick", "verify", "compact"]), chains, places),
    ),
    max_size=50,
)


@settings(max_examples=40, deadline=None)
@given(steps, st.sampled_from(WritePolicy), st.sampled_from([0, 3, 25]))
def test_a_store_serves_what_was_put_and_its_books_agree(
    tmp_path_factory: pytest.TempPathFactory,
    taken: list[tuple[str, int, int]],
    policy: WritePolicy,
    memory_blocks: int,
) -> None:
    asyncio.run(_Life(tmp_path_factory.mktemp("store"), policy, memory_blocks).live(list(taken)))


class _Life:
    def __init__(self, path: Path, policy: WritePolicy, memory_blocks: int) -> None:
        self._path = path
        self._policy = policy
        self._memory_blocks = memory_blocks
        self._clock = ManualClock(0.0)
        self._present: set[int] = set()  # what may be there: put, and not deleted since
        self._rotten = False

    async def live(self, taken: list[tuple[str, int, int]]) -> None:
        while taken:
            async with opened(
                self._path,
                memory_blocks=self._memory_blocks,
                disk_bytes=MIN_DISK_BYTES,
                clock=self._clock,
                disposable=True,
                memory_quotas=QUOTAS,
                disk_quotas=QUOTAS,
                write_policy=self._policy,
                since_boot=self._clock,
            ) as store:
                while taken:
                    step, chain, place = taken.pop(0)
                    if step == "restart":
                        break
                    await self._take(store, step, range(chain * CHAIN, chain * CHAIN + place))
                    self._check(store)
        if (self._path / "data.mdb").exists():
            assert (self._path / "data.mdb").stat().st_size <= MIN_DISK_BYTES

    async def _take(self, store: Store, step: str, numbers: range) -> None:
        if step == "put":
            tenant, ttl_s = ("b" if numbers.start % 20 else "a"), (TTL_S if numbers.start % 30 else 0.0)
            await put_chain(store, *numbers, flush=False, tenant=tenant, ttl_s=ttl_s)
            self._present.update(numbers)
        elif step == "get":
            served = await get(store, *numbers)
            assert set(numbers[: len(served)]) <= self._present
        elif step == "delete":
            await store.delete(Selector(block_hash=hash_of(numbers[-1])))
            self._present.difference_update(range(numbers[-1], numbers.start + CHAIN))
            assert set(where(store, *range(numbers[-1], numbers.start + CHAIN))) == {Tier.NONE}
        elif step == "pin":
            store.pin([key_of(numbers[-1])], 50.0 * (len(numbers) % 3))
        elif step == "rot":
            self._rot(store, numbers[-1])
        elif step == "forget":
            store._memory.discard(key_of(numbers[-1]))
        elif step == "flush":
            await store.flush(FLUSH_S)
        elif step == "wait":
            self._clock.now += 15.0 * len(numbers)
        elif step == "tick":
            store._upkeep.tick()
        elif step == "verify":
            _ = [progress async for progress in store.verify()]
        elif step == "compact":
            assert [progress async for progress in store.compact()] != []

    def _rot(self, store: Store, number: int) -> None:
        """Another block's bytes in the record's place."""
        assert store._disk is not None
        with store._disk._env.begin(write=True) as txn:
            if txn.get(key_of(number)):
                txn.put(key_of(number), record.pack(key_of(number), block_of(number + 1)))
                self._rotten = True

    def _check(self, store: Store) -> None:
        store._memory.check()
        assert store._writer is not None
        books = store._writer.books
        books.index.check()
        assert books._slab_bytes.keys() == set(books.index)
        assert store._writer.pending.num_bytes == SLAB_BYTES * len(store._writer.pending)
        stats = store.stats()
        assert (stats.write_failures, stats.wipes) == (0, 0)
        assert stats.corrupt == 0 or self._rotten
