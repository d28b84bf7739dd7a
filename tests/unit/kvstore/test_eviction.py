from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import GHOSTS_PER_BLOCK, MAX_WEIGHT, MIN_WEIGHT, ByteLRU, EvictionQueue, Place

keys = st.integers(0, 6).map(lambda i: bytes([i]))


def test_the_oldest_go_first_and_only_as_many_as_needed() -> None:
    lru = ByteLRU(100)
    for key, size in ((b"a", 40), (b"b", 30), (b"c", 20)):
        lru.add(key, size)
    lru.touch([b"a", b"missing"])
    assert lru.make_room(10) == []
    assert lru.make_room(11) == [b"b"]
    assert list(lru) == [b"c", b"a"]
    assert lru.used_bytes == 60


def test_touching_a_chain_backwards_makes_its_head_the_last_to_go() -> None:
    lru = ByteLRU(3)
    for key in (b"head", b"middle", b"tail"):
        lru.add(key, 1)
    lru.touch(reversed([b"head", b"middle", b"tail"]))
    assert lru.pop_oldest(2) == [b"tail", b"middle"]


def test_adding_without_room_is_refused_and_changes_nothing() -> None:
    lru = ByteLRU(10)
    lru.add(b"a", 6)
    with pytest.raises(ValueError, match="5 bytes do not fit: 6 of 10 are used"):
        lru.add(b"b", 5)
    assert list(lru) == [b"a"]


def test_adding_again_replaces_the_size() -> None:
    lru = ByteLRU(10)
    lru.add(b"a", 6)
    lru.add(b"a", 9)
    assert (lru.used_bytes, len(lru)) == (9, 1)


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), keys, st.integers(0, 12)), max_size=60))
def test_it_behaves_as_an_ordered_list_with_a_bound(operations: list[tuple[str, bytes, int]]) -> None:
    lru, model = ByteLRU(20), OrderedDict[bytes, int]()
    for operation, key, size in operations:
        if operation == "add":
            lru.discard(key)
            model.pop(key, None)
            evicted = lru.make_room(size)
            expected = []
            while sum(model.values()) + size > 20:
                expected.append(model.popitem(last=False)[0])
            assert evicted == expected
            lru.add(key, size)
            model[key] = size
        elif operation == "touch":
            lru.touch([key])
            if key in model:
                model.move_to_end(key)
        else:
            lru.discard(key)
            model.pop(key, None)
        assert list(lru) == list(model)
        assert lru.used_bytes == sum(model.values()) <= 20


class Queue:
    """An EvictionQueue, the places of its blocks, and a bound on how many there are."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = EvictionQueue()
        self.places: dict[bytes, Place] = {}
        self._num_blocks = num_blocks

    def use(self, *names: str) -> None:
        """A hit, or else a new block, for which another one may have to go."""
        for key in (name.encode() for name in names):
            if key in self.places:
                self.queue.hit(key, self.places[key])
                continue
            while len(self.places) >= self._num_blocks:
                self._evict()
            self.places[key] = self.queue.enter(key, reused=False)

    def _evict(self) -> None:
        gone = self.queue.pop()
        place = self.places.pop(gone)
        self.queue.forget(gone, place)
        self.queue.remember_evicted(gone, place)

    def held(self) -> set[str]:
        return {key.decode() for key in self.places}


def test_while_nothing_was_learned_the_least_recently_used_goes() -> None:
    held = Queue(3)
    held.use("a", "b", "c", "a", "d")
    assert held.held() == {"a", "c", "d"}
    held.use("e", "f")
    assert held.held() == {"d", "e", "f"}


def test_a_scan_does_not_empty_the_store_once_reused_blocks_were_missed() -> None:
    held = Queue(20)
    regulars = [f"r{number}" for number in range(10)]
    hits = []
    for round_ in range(30):
        hits.append(len(held.held() & set(regulars)))
        held.use(*regulars)
        held.use(*(f"scan{round_}-{number}" for number in range(15)))
    assert hits[:2] == [0, 5]  # as LRU has it: five gave way to the scan
    assert hits[-1] == 10
    assert held.queue.weight > 1.5


def test_fresh_blocks_that_come_back_lower_the_weight() -> None:
    held = Queue(10)
    held.queue.weight = MAX_WEIGHT
    held.use(*(f"r{number}" for number in range(8)), *(f"r{number}" for number in range(8)))
    for round_ in range(200):
        held.use(*(f"p{round_}-{number}" for number in range(4)), *(f"p{round_}-{number}" for number in range(4)))
    assert held.queue.weight < MAX_WEIGHT / 2


def test_a_suspended_block_does_not_go_and_a_resumed_one_is_next_in_its_list() -> None:
    queue = EvictionQueue()
    places = {key: queue.enter(key, reused=False) for key in (b"a", b"b", b"c")}
    queue.suspend(b"a", places[b"a"])
    assert b"a" not in queue
    assert queue.pop() == b"b"
    queue.resume(b"a", places[b"a"])
    assert queue.pop() == b"a"
    assert queue.pop() == b"c"
    assert not queue
    with pytest.raises(KeyError):
        queue.pop()


def test_a_hit_on_a_suspended_block_counts_once_it_is_resumed() -> None:
    queue = EvictionQueue()
    place = queue.enter(b"a", reused=False)
    queue.suspend(b"a", place)
    queue.hit(b"a", place)
    assert b"a" not in queue
    assert place.reused


@given(st.lists(st.text("abcdefghijklmnop", min_size=1, max_size=1), max_size=200))
def test_ghosts_are_bounded_by_the_blocks(names: list[str]) -> None:
    held = Queue(4)
    for name in names:
        held.use(name)
        assert held.queue.num_blocks == len(held.places) <= 4
        assert len(held.queue._fresh.ghosts) + len(held.queue._reused.ghosts) <= 4 * GHOSTS_PER_BLOCK
        assert all(key in held.queue for key in held.places)
        assert MIN_WEIGHT <= held.queue.weight <= MAX_WEIGHT
