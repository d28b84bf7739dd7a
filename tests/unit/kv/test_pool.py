from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvrelay.errors import DuplicateRequestError, NeverFitsError, NotFoundError, OverloadedError
from kvrelay.kv.pool import BlockPool, PoolCorruptError
from kvrelay.types import BlockCounts, BlockHash, BlockId, ReservationId

A, B, HOLDER = ReservationId("a"), ReservationId("b"), ReservationId("holder")


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def chain(length: int, start: int = 0) -> list[BlockHash]:
    return [hash_of(start + i) for i in range(length)]


def hold(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    """Fresh blocks, held once."""
    pool.reserve(HOLDER, [], num_blocks)
    return pool.commit(HOLDER)


def cache(pool: BlockPool, hashes: list[BlockHash]) -> list[BlockId]:
    """Puts full blocks of these hashes into the cached state."""
    block_ids = hold(pool, len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        assert pool.register(block_id, block_hash)
    pool.release(block_ids)
    return block_ids


def counts(pool: BlockPool) -> tuple[int, int, int, int]:
    pool.check()
    found = pool.counts()
    return found.free, found.reserved, found.held, found.cached


def test_reserve_then_commit_then_release_frees_everything() -> None:
    pool = BlockPool(4)
    reservation = pool.reserve(A, [], 3)
    assert counts(pool) == (1, 3, 0, 0)
    assert pool.commit(A) == reservation.block_ids
    assert counts(pool) == (1, 0, 3, 0)
    pool.release(reservation.block_ids)
    assert counts(pool) == (4, 0, 0, 0)


def test_reserve_pins_the_longest_cached_prefix() -> None:
    pool = BlockPool(6)
    cached = cache(pool, chain(3))
    reservation = pool.reserve(A, [*chain(2), hash_of(99), hash_of(2)], 4)
    assert reservation.block_ids[:2] == cached[:2]
    assert reservation.num_cached == 2
    assert counts(pool) == (1, 2, 2, 1)
    pool.cancel(A)
    assert counts(pool) == (3, 0, 0, 3)


def test_a_prefix_longer_than_the_reservation_is_cut() -> None:
    pool = BlockPool(4)
    cache(pool, chain(3))
    assert pool.reserve(A, chain(3), 2).num_cached == 2
    assert counts(pool) == (1, 0, 2, 1)


def test_two_reservations_share_a_pinned_prefix() -> None:
    pool = BlockPool(6)
    shared = cache(pool, chain(2))
    pool.reserve(A, chain(2), 3)
    pool.reserve(B, chain(2), 3)
    pool.cancel(A)
    assert counts(pool) == (3, 1, 2, 0)
    assert pool.commit(B)[:2] == shared


def test_pinned_blocks_do_not_count_as_room() -> None:
    """Three are cached and asked for; the pool of four cannot add two fresh ones without evicting a pinned one."""
    pool = BlockPool(4)
    cache(pool, chain(3))
    pool.reserve(B, [], 1)
    with pytest.raises(OverloadedError, match="1 more KV blocks are needed; 0 of 4 are available"):
        pool.reserve(A, chain(3), 4)
    assert counts(pool) == (0, 1, 0, 3)


def test_what_can_never_fit_says_so() -> None:
    pool = BlockPool(2)
    with pytest.raises(NeverFitsError, match="3 KV blocks are needed; this node has 2"):
        pool.reserve(A, [], 3)
    assert counts(pool) == (2, 0, 0, 0)


def test_reservation_ids_are_used_once_at_a_time() -> None:
    pool = BlockPool(4)
    pool.reserve(A, [], 1)
    with pytest.raises(DuplicateRequestError):
        pool.reserve(A, [], 1)
    pool.cancel(A)
    with pytest.raises(NotFoundError):
        pool.cancel(A)
    with pytest.raises(NotFoundError):
        pool.commit(A)
    assert counts(pool) == (4, 0, 0, 0)


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(4)
    cached = cache(pool, chain(4))
    hold(pool, 2)
    assert pool.match(chain(4)) == cached[:2]
    assert pool.num_evictions == 2


def test_the_least_recently_used_chain_goes_first() -> None:
    pool = BlockPool(4)
    old, recent = chain(2, start=10), chain(2, start=20)
    old_ids = cache(pool, old)
    cache(pool, recent)
    pool.acquire(old_ids)
    pool.release(old_ids)
    hold(pool, 2)
    assert pool.match(old) == old_ids
    assert pool.match(recent) == []


def test_match_and_find_change_nothing() -> None:
    pool = BlockPool(2)
    first = cache(pool, [hash_of(1)])
    cache(pool, [hash_of(2)])
    assert pool.match([hash_of(1)]) == first
    assert pool.find(hash_of(1)) == first[0]
    hold(pool, 1)
    assert pool.find(hash_of(1)) is None


def test_the_first_block_of_a_hash_keeps_it() -> None:
    pool = BlockPool(3)
    first, second = hold(pool, 2)
    assert pool.register(first, hash_of(1))
    assert pool.register(first, hash_of(1))
    assert not pool.register(second, hash_of(1))
    pool.release([first, second])
    assert counts(pool) == (2, 0, 0, 1)
    assert pool.find(hash_of(1)) == first


def test_a_held_block_can_be_shared_once_registered() -> None:
    pool = BlockPool(2)
    (block_id,) = hold(pool, 1)
    pool.register(block_id, hash_of(1))
    pool.reserve(A, [hash_of(1)], 2)
    pool.release([block_id])
    assert counts(pool) == (0, 1, 1, 0)


def test_a_running_sequence_takes_blocks_one_by_one_and_evicts_what_is_cached() -> None:
    pool = BlockPool(4)
    cached = cache(pool, chain(2))
    assert len(pool.allocate(2)) == 2
    assert pool.allocate(1) == [cached[1]]
    assert counts(pool) == (0, 0, 3, 1)
    with pytest.raises(OverloadedError, match="2 more KV blocks are needed; 1 of 4 are available"):
        pool.allocate(2)
    assert counts(pool) == (0, 0, 3, 1)
    assert pool.allocate(0) == []


def test_only_a_block_that_one_holds_and_nobody_can_find_may_be_written() -> None:
    pool = BlockPool(3)
    named, shared, own = hold(pool, 3)
    pool.register(named, hash_of(1))
    pool.acquire([shared])
    assert [pool.may_write(block_id) for block_id in (named, shared, own)] == [False, False, True]
    pool.release([shared, own])
    assert [pool.may_write(block_id) for block_id in (named, shared, own)] == [False, True, False]


def test_misuse_is_found_and_changes_nothing() -> None:
    pool = BlockPool(3)
    held, other = hold(pool, 2)
    pool.register(held, hash_of(1))
    for misuse in (
        lambda: pool.release([other, held, held]),
        lambda: pool.release([BlockId(0), BlockId(2)]),
        lambda: pool.acquire([BlockId(2)]),
        lambda: pool.register(BlockId(2), hash_of(2)),
        lambda: pool.register(held, hash_of(2)),
    ):
        with pytest.raises(PoolCorruptError):
            misuse()
        assert counts(pool) == (1, 0, 2, 0)


def test_check_finds_a_stranded_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(PoolCorruptError, match="a block has no state"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random lives of requests against a model that only knows who owns what."""

    NUM_BLOCKS = 8
    tables = Bundle("tables")  # lists of held blocks, each to be released once
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.refs: Counter[BlockId] = Counter()
        self.fresh: dict[ReservationId, list[BlockId]] = {}
        self.num_made = 0

    def hold(self, block_ids: list[BlockId]) -> None:
        assert not any(self.refs[b] == 0 and b in self.all_fresh() for b in block_ids)
        self.refs.update(block_ids)

    def all_fresh(self) -> set[BlockId]:
        return {b for ids in self.fresh.values() for b in ids}

    def taken(self) -> set[BlockId]:
        return self.all_fresh() | {b for b, n in self.refs.items() if n}

    @rule(target=reservations, start=st.integers(0, 2), length=st.integers(0, 5), num_blocks=st.integers(0, 9))
    def reserve(self, start: int, length: int, num_blocks: int) -> object:
        reservation_id = ReservationId(f"r{self.num_made}")
        self.num_made += 1
        hashes = chain(length, start)
        pinned = self.pool.match(hashes)[:num_blocks]
        room = self.NUM_BLOCKS - len(self.taken() | set(pinned))
        try:
            reservation = self.pool.reserve(reservation_id, hashes, num_blocks)
        except (OverloadedError, NeverFitsError):
            assert num_blocks - len(pinned) > room
            return multiple()
        assert reservation.pinned_ids == pinned
        assert len(reservation.block_ids) == num_blocks
        assert not set(reservation.fresh_ids) & self.taken()
        self.hold(pinned)
        self.fresh[reservation_id] = reservation.fresh_ids
        return reservation_id, pinned

    @rule(target=tables, reservation=consumes(reservations))
    def commit(self, reservation: tuple[ReservationId, list[BlockId]]) -> list[BlockId]:
        reservation_id, pinned = reservation
        block_ids = self.pool.commit(reservation_id)
        fresh = self.fresh.pop(reservation_id)
        assert block_ids == pinned + fresh
        self.refs.update(fresh)
        return block_ids

    @rule(reservation=consumes(reservations))
    def cancel(self, reservation: tuple[ReservationId, list[BlockId]]) -> None:
        reservation_id, pinned = reservation
        self.pool.cancel(reservation_id)
        del self.fresh[reservation_id]
        self.refs.subtract(pinned)

    @rule(target=tables, table=tables)
    def share(self, table: list[BlockId]) -> object:
        if not all(self.refs[b] for b in table):
            return multiple()
        self.pool.acquire(table)
        self.refs.update(table)
        return list(table)

    @rule(table=consumes(tables))
    def release(self, table: list[BlockId]) -> None:
        self.pool.release(table)
        self.refs.subtract(table)

    @rule(table=tables, start=st.integers(0, 2))
    def register(self, table: list[BlockId], start: int) -> None:
        for block_id, block_hash in zip(table, chain(len(table), start), strict=True):
            owner = self.pool.find(block_hash)
            if self.refs[block_id] and block_id not in self.pool._hashes:
                assert self.pool.register(block_id, block_hash) == (owner is None)

    @rule(block_ids=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def disown(self, block_ids: set[int]) -> None:
        names = [self.pool._hashes[BlockId(i)] for i in block_ids if i in self.pool._hashes]
        self.pool.disown([BlockId(i) for i in block_ids])
        assert all(self.pool.find(name) is None for name in names)

    @invariant()
    def books_agree(self) -> None:
        self.pool.check()
        found = self.pool.counts()
        assert found.held == sum(n > 0 for n in self.refs.values())
        assert found.reserved == len(self.all_fresh())
        assert found.available == self.NUM_BLOCKS - len(self.taken())

    def teardown(self) -> None:
        for reservation_id in list(self.fresh):
            self.pool.cancel(reservation_id)
        self.pool.check()
        assert self.pool.counts().reserved == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_empty_pool_counts_nothing() -> None:
    assert BlockPool(0).counts() == BlockCounts()
