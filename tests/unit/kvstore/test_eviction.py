import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import GHOSTS_PER_BLOCK, MAX_WEIGHT, MIN_WEIGHT, EvictionQueue, Place

keys = st.integers(0, 6).map(lambda i: bytes([i]))


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
