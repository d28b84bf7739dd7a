"""What a tier's books promise, case by case."""

from __future__ import annotations

import pytest

from kvstore.block import BlockInfo
from kvstore.index import NOT_PINNED, TierIndex
from kvstore.quotas import Quotas

NAMESPACE = b"n" * 16
OTHER_NAMESPACE = b"m" * 16


def chain(name: str, length: int, tenant: str = "default", ttl_s: float = 0.0, start: int = 0) -> list[BlockInfo]:
    """Blocks `start`, ... of the chain `name`; readable keys such as b"nnnnnnnnnnnnnnnn" + b"a2"."""
    keys = [NAMESPACE + f"{name}{i}".encode() for i in range(start - 1, start + length)]
    return [BlockInfo(keys[i + 1], keys[i], start + i, tenant, ttl_s) for i in range(length)]


def keys(name: str, *places: int) -> list[bytes]:
    return [NAMESPACE + f"{name}{place}".encode() for place in places]


def put(index: TierIndex, blocks: list[BlockInfo], num_bytes: int = 1, now: float = 0.0) -> list[bytes] | None:
    """Makes room for each and adds it; the keys that went, or None as soon as room cannot be made."""
    dropped: list[bytes] = []
    for info in blocks:
        made = index.make_room(num_bytes, info.tenant, now, keep=[info.parent])
        if made is None:
            return None
        dropped += made
        index.add(info, num_bytes, now)
        index.check()
    return dropped


def index_of(capacity_bytes: int, **quotas: int) -> TierIndex:
    return TierIndex(capacity_bytes, Quotas(by_tenant=quotas))


def test_a_chain_goes_from_its_tail_and_the_oldest_chain_first() -> None:
    index = index_of(5)
    assert put(index, chain("a", 3) + chain("b", 2)) == []
    assert put(index, chain("c", 2)) == keys("a", 2, 1)
    assert index.num_evictions == 2


def test_a_prefix_that_others_follow_outlives_them() -> None:
    index = index_of(4)
    put(index, chain("a", 2))
    put(index, [BlockInfo(keys("x", 0)[0], keys("a", 0)[0], 1, "default", 0.0)])
    put(index, chain("b", 1))
    assert put(index, chain("c", 3)) == [*keys("a", 1), *keys("x", 0), *keys("a", 0)]


def test_a_hit_makes_a_chain_the_last_to_go() -> None:
    index = index_of(4)
    put(index, chain("a", 2) + chain("b", 2))
    index.hit(keys("a", 0, 1), 5.0)
    assert put(index, chain("c", 2)) == keys("b", 1, 0)
    assert (index.hits(keys("a", 0)[0]), index.last_used(keys("a", 1)[0])) == (1, 5.0)


def test_regulars_outlive_a_scan_once_they_were_missed() -> None:
    """Under LRU the scan, which is larger than the tier, would drop them every time."""
    index = index_of(20)
    held = []
    for round_ in range(40):
        held.append(sum(key in index for key in keys("r", *range(10))))
        index.hit(keys("r", *range(10)), 0.0)
        put(index, [info for info in chain("r", 10) if info.key not in index])
        for number in range(15):
            put(index, chain(f"scan{round_}-{number}-", 1))
    assert held[1] < 10
    assert held[-1] == 10


def test_what_continues_a_reused_chain_is_expected_to_be_reused_but_a_branch_of_it_is_not() -> None:
    """A conversation's next turn goes on with its tail; a new prompt branches off a shared system prompt."""
    index = index_of(5)
    put(index, chain("a", 1))
    index.hit(keys("a", 0), 0.0)
    put(index, chain("a", 1, start=1))
    branch = BlockInfo(keys("branch", 1)[0], keys("a", 0)[0], 1, "default", 0.0)
    put(index, [branch, *chain("b", 1), *chain("c", 1)])
    index._tenants["default"].queue.weight = 16.0
    assert index.make_room(2, "default", 0.0) == [branch.key, *keys("b", 0)]


def test_hits_on_what_is_not_here_are_passed_over() -> None:
    index = index_of(4)
    put(index, chain("a", 1))
    index.hit(keys("a", 0, 1, 2), 1.0)
    assert len(index) == 1


def test_the_parent_of_what_is_to_come_stays() -> None:
    index = index_of(2)
    put(index, chain("a", 1) + chain("b", 1))
    assert index.make_room(1, "default", 0.0, keep=keys("a", 0)) == keys("b", 0)
    index.check()
    assert index.make_room(2, "default", 0.0, keep=keys("a", 0)) is None
    index.check()
    assert index.make_room(2, "default", 0.0) == keys("a", 0)


def test_a_parent_that_was_kept_does_not_go_sooner_for_it() -> None:
    index = index_of(3)
    put(index, chain("a", 1) + chain("b", 1) + chain("c", 1))
    assert index.make_room(1, "default", 0.0, keep=keys("c", 0)) == keys("a", 0)
    assert index.make_room(2, "default", 0.0) == keys("b", 0)


def test_when_room_cannot_be_made_nothing_changes() -> None:
    index = index_of(5)
    put(index, chain("a", 3, ttl_s=10.0) + chain("b", 2))
    index.pin(keys("b", 1), 100.0)
    assert index.make_room(4, "default", 50.0) is None
    index.check()
    assert set(index) == set(keys("a", 0, 1, 2) + keys("b", 0, 1))
    assert (index.num_evictions, index.num_expired) == (0, 0)
    assert index.make_room(3, "default", 5.0) == keys("a", 2, 1, 0)


@pytest.mark.parametrize("num_bytes", [6, 5])
def test_more_than_the_tier_or_the_quota_is_refused(num_bytes: int) -> None:
    index = index_of(5, alice=4)
    put(index, chain("a", 3))
    assert index.make_room(num_bytes, "alice", 0.0) is None
    assert len(index) == 3


def test_adding_without_room_raises_and_changes_nothing() -> None:
    index = index_of(5, alice=2)
    put(index, chain("a", 2, "alice"))
    with pytest.raises(ValueError, match="1 bytes do not fit: 2 of 5 are used"):
        index.add(chain("b", 1, "alice")[0], 1, 0.0)
    with pytest.raises(ValueError, match="5 bytes do not fit"):
        index.add(chain("a", 1)[0], 5, 0.0)
    index.check()
    assert index.used_bytes == 2


def test_adding_again_replaces_the_size_and_keeps_hits_pin_and_followers() -> None:
    index = index_of(10)
    put(index, chain("a", 2))
    index.hit(keys("a", 0), 1.0)
    index.pin(keys("a", 0), 100.0)
    index.add(chain("a", 1)[0], 7, 2.0)
    index.check()
    assert (index.used_bytes, index.num_bytes(keys("a", 0)[0]), index.hits(keys("a", 0)[0])) == (8, 7, 1)
    assert index.pinned_until(keys("a", 0)[0]) == 100.0
    assert index.discard(keys("a", 0)[0]) == keys("a", 1, 0)


def test_a_tenant_at_its_quota_pays_for_itself() -> None:
    index = index_of(10, alice=3)
    put(index, chain("b", 4, "bob") + chain("a", 3, "alice"))
    assert put(index, chain("c", 2, "alice")) == keys("a", 2, 1)
    assert index.tenants() == {"bob": 4, "alice": 3}


def test_a_full_tier_takes_from_whoever_holds_most() -> None:
    index = index_of(10)
    put(index, chain("a", 3, "alice") + chain("b", 7, "bob"))
    index.hit(keys("b", *range(7)), 1.0)
    assert put(index, chain("c", 2, "carol")) == keys("b", 6, 5)
    assert index.tenants() == {"alice": 3, "bob": 5, "carol": 2}


def test_a_flood_of_one_tenant_leaves_the_shares_of_others_alone() -> None:
    index = index_of(90)
    put(index, chain("a", 30, "alice") + chain("b", 30, "bob"))
    for number in range(50):
        put(index, chain(f"f{number}-", 10, "flood"))
    assert index.tenants() == {"alice": 30, "bob": 30, "flood": 30}


def test_a_quota_is_made_room_for_without_touching_what_others_built_on_it() -> None:
    index = index_of(10, alice=1)
    put(index, chain("a", 1, "alice") + chain("a", 1, "bob", start=1))
    assert index.make_room(1, "alice", 0.0) is None
    index.check()
    assert set(index) == set(keys("a", 0, 1))


def test_what_expired_goes_first_and_counts_as_expired() -> None:
    index = index_of(4)
    put(index, chain("a", 2) + chain("b", 2, ttl_s=10.0))
    assert put(index, chain("c", 1), now=10.0) == keys("b", 1, 0)
    assert (index.num_expired, index.num_evictions) == (2, 0)


def test_a_hit_sets_the_time_to_live_again() -> None:
    index = index_of(4)
    put(index, chain("a", 2, ttl_s=5.0))
    index.hit(keys("a", 0, 1), 4.0)
    assert index.expire(8.9) == []
    assert index.expire(9.0) == keys("a", 1, 0)
    assert index.num_expired == 2


def test_looking_renews_nothing() -> None:
    index = index_of(4)
    put(index, chain("a", 1, ttl_s=5.0))
    for now in range(5):
        assert keys("a", 0)[0] in index
        assert index.expire(float(now)) == []
    assert index.expire(5.0) == keys("a", 0)


def test_an_expired_block_waits_for_what_follows_it() -> None:
    index = index_of(4)
    put(index, chain("a", 1, ttl_s=5.0) + chain("a", 1, ttl_s=20.0, start=1))
    assert index.expire(6.0) == []
    index.check()
    assert index.expire(20.0) == keys("a", 1, 0)


def test_an_expired_block_that_is_used_all_the_same_lives_on() -> None:
    index = index_of(4)
    put(index, chain("a", 1, ttl_s=5.0) + chain("a", 1, ttl_s=20.0, start=1))
    index.expire(6.0)
    index.hit(keys("a", 0), 7.0)
    index.discard(keys("a", 1)[0])
    assert index.expire(11.9) == []
    assert index.expire(12.0) == keys("a", 0)


def test_an_expired_block_that_was_dropped_and_stored_again_starts_anew() -> None:
    index = index_of(4)
    put(index, chain("a", 1, ttl_s=5.0) + chain("a", 1, start=1))
    index.expire(6.0)
    index.discard(keys("a", 0)[0])
    index.check()
    put(index, chain("a", 1, ttl_s=5.0), now=7.0)
    assert index.expire(11.9) == []
    assert index.expire(12.0) == keys("a", 0)


def test_pinned_blocks_and_what_they_follow_stay() -> None:
    index = index_of(4)
    put(index, chain("a", 2, ttl_s=5.0) + chain("b", 2))
    assert index.pin(keys("a", 1, 2), 100.0) == 1
    assert index.num_pinned == 1
    assert index.expire(50.0) == []
    assert put(index, chain("c", 2), now=50.0) == keys("b", 1, 0)
    assert index.make_room(3, "default", 50.0) is None


def test_a_pin_ends_by_its_time_or_when_it_is_taken_back() -> None:
    index = index_of(2)
    put(index, chain("a", 1) + chain("b", 1))
    index.pin(keys("a", 0), 10.0)
    index.pin(keys("b", 0), 100.0)
    assert index.make_room(1, "default", 9.9) is None
    assert index.make_room(1, "default", 10.0) == keys("a", 0)
    assert index.pin(keys("b", 0), NOT_PINNED) == 1
    index.check()
    assert index.make_room(2, "default", 10.0) == keys("b", 0)


def test_a_shorter_pin_replaces_a_longer_one() -> None:
    index = index_of(1)
    put(index, chain("a", 1))
    index.pin(keys("a", 0), 100.0)
    index.pin(keys("a", 0), 10.0)
    assert index.make_room(1, "default", 10.0) == keys("a", 0)


def test_discard_takes_along_what_follows_pinned_or_not() -> None:
    index = index_of(9)
    put(index, chain("a", 4) + chain("b", 1))
    index.pin(keys("a", 3), 100.0)
    assert index.discard(keys("a", 1)[0]) == keys("a", 3, 2, 1)
    assert index.discard(keys("a", 1)[0]) == []
    index.check()
    assert (index.used_bytes, index.num_pinned) == (2, 0)


def test_select_finds_by_tenant_namespace_prefix_and_age() -> None:
    index = index_of(20)
    put(index, chain("a", 3, "alice"), now=0.0)
    put(index, chain("b", 2, "bob"), now=8.0)
    foreign = BlockInfo(OTHER_NAMESPACE + b"c0", OTHER_NAMESPACE + b"root", 0, "alice", 0.0)
    put(index, [foreign], now=9.0)
    assert set(index.select(tenant="alice", now=10.0)) == {*keys("a", 0, 1, 2), foreign.key}
    assert index.select(namespace=OTHER_NAMESPACE, now=10.0) == [foreign.key]
    assert index.select(key=keys("a", 1)[0], now=10.0) == keys("a", 2, 1)
    assert index.select(key=keys("a", 9)[0], now=10.0) == []
    assert index.select(tenant="alice", unused_s=5.0, now=10.0) == keys("a", 2, 1, 0)
    assert index.select(tenant="bob", key=keys("a", 0)[0], now=10.0) == []
    assert len(index.select(now=10.0)) == 6


def test_restored_blocks_keep_their_age_hits_and_lifetime() -> None:
    index = index_of(3)
    assert index.restore(chain("a", 1, ttl_s=50.0)[0], 1, last_used=10.0, hits=4)
    assert index.restore(chain("b", 1)[0], 1, last_used=20.0, hits=0)
    assert not index.restore(chain("b", 1)[0], 1, last_used=20.0, hits=0)
    assert not index.restore(chain("c", 1)[0], 2, last_used=30.0, hits=0)
    index.check()
    assert (index.hits(keys("a", 0)[0]), index.last_used(keys("a", 0)[0])) == (4, 10.0)
    assert index.expire(60.0) == keys("a", 0)


def test_a_restored_chain_may_come_in_any_order() -> None:
    index = index_of(3)
    for info in (chain("a", 3)[2], chain("a", 3)[0], chain("a", 3)[1]):
        assert index.restore(info, 1, last_used=1.0, hits=0)
        index.check()
    assert index.make_room(3, "default", 2.0) == keys("a", 2, 1, 0)


def test_blocks_that_are_said_to_follow_each_other_in_a_circle_are_not_accepted() -> None:
    index = index_of(9)
    a, b = keys("a", 0)[0], keys("b", 0)[0]
    itself = BlockInfo(a, a, 0, "default", 0.0)
    first, second = BlockInfo(a, b, 0, "default", 0.0), BlockInfo(b, a, 1, "default", 0.0)
    assert not index.accepts(itself)
    assert index.accepts(first)
    index.add(first, 1, 0.0)
    assert not index.accepts(second)
    assert not index.restore(second, 1, 0.0, 0)
    with pytest.raises(ValueError, match=r"place 1 of .* does not fit those beside it"):
        index.add(second, 1, 0.0)
    index.check()
    assert index.discard(a) == [a]


def test_a_block_whose_place_is_not_after_its_parents_is_not_accepted() -> None:
    """After, not next: the parent may be from a sender that knows no chains, and says 0 of every block."""
    index = index_of(9)
    put(index, chain("a", 1))
    assert not index.accepts(BlockInfo(keys("a", 1)[0], keys("a", 0)[0], 0, "default", 0.0))
    assert index.accepts(BlockInfo(keys("a", 1)[0], keys("a", 0)[0], 2, "default", 0.0))
    assert index.accepts(chain("a", 2)[1])


def test_a_tier_without_room_takes_nothing() -> None:
    index = index_of(0)
    assert index.make_room(1, "default", 0.0) is None
    assert index.expire(5.0) == []
    index.check()


def test_check_finds_books_that_disagree() -> None:
    index = index_of(3)
    put(index, chain("a", 2))
    index._tenants["default"].num_bytes += 1
    with pytest.raises(AssertionError, match="the books say"):
        index.check()
