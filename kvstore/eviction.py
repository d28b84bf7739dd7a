"""Which blocks give way when a tier is full: those unused for longest, where blocks never used again age faster.

Two lists by last use, as in ARC (Megiddo and Modha, FAST 2003), with ages where ARC has sizes. A block waits with
the fresh or, once it or the tail that it continues was used again, with the reused. The oldest of either list may go;
the fresh one's age counts `weight` times. Keys of what was evicted stay for a while: one that comes back from the
fresh list says that fresh blocks went too early, and lowers the weight; one from the reused list raises it. At weight
1 this is LRU, which is what conversations want of a large store; a scan of prompts that nobody repeats raises it.
docs/kvstore.md has the hit rates beside those of LRU, LFU, FIFO, ARC and S3-FIFO.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

MIN_WEIGHT = 1.0
MAX_WEIGHT = 16.0
# The logarithm of the weight moves by about this if every key of a ghost list comes back,
ADAPTATION = 4.0
MAX_STEP = 0.1  # and by no more than this for one key.
GHOSTS_PER_BLOCK = 2


@dataclass(slots=True, eq=False)
class Place:
    """What the queue knows of a block, kept by whoever keeps the block."""

    reused: bool
    used_at: int  # in uses of the queue's blocks: an idle night makes nothing older


class _List:
    """Blocks in the order of their last use, oldest first, and the ghosts of those that were evicted from here."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[bytes, Place] = OrderedDict()
        self.ghosts: OrderedDict[bytes, int] = OrderedDict()  # when each was evicted

    def oldest(self) -> Place | None:
        return next(iter(self.waiting.values()), None)

    def oldest_ghost(self) -> float:
        return next(iter(self.ghosts.values()), math.inf)


class EvictionQueue:
    """One tenant's blocks. Only those that may go wait in it: tails of chains that nobody pinned.

    Knows neither chains nor bytes: its owner suspends a block that something follows, and resumes it, to be thought
    of next, when what followed has gone. Every call takes O(1) steps, amortised over the blocks that enter.
    """

    def __init__(self) -> None:
        self.weight = MIN_WEIGHT
        self.num_blocks = 0  # that entered and were not forgotten, waiting or not
        self._fresh = _List()
        self._reused = _List()
        self._uses = 0

    def __bool__(self) -> bool:
        """Whether a block could go."""
        return bool(self._fresh.waiting or self._reused.waiting)

    def __contains__(self, key: object) -> bool:
        """Whether it waits."""
        return key in self._fresh.waiting or key in self._reused.waiting

    def enter(self, key: bytes, reused: bool) -> Place:
        """A block that may go. `reused`: it was used by an earlier process, or continues the tail of a reused chain."""
        returned = self._came_back(key)
        self._uses += 1
        self.num_blocks += 1
        place = Place(reused or returned, self._uses)
        self._list_of(place).waiting[key] = place
        return place

    def hit(self, key: bytes, place: Place) -> None:
        self._uses += 1
        waited = self._list_of(place).waiting.pop(key, None) is not None
        place.reused = True
        place.used_at = self._uses
        if waited:
            self._reused.waiting[key] = place

    def suspend(self, key: bytes, place: Place) -> None:
        """The block may not go now."""
        self._list_of(place).waiting.pop(key, None)

    def resume(self, key: bytes, place: Place) -> None:
        """The block may go again. What it kept was as old as itself, so it is next in its list."""
        waiting = self._list_of(place).waiting
        waiting[key] = place
        waiting.move_to_end(key, last=False)

    def pop(self) -> bytes:
        """The block to go, suspended now. Raises KeyError when none waits."""
        fresh, reused = self._fresh.oldest(), self._reused.oldest()
        if fresh is None or (reused is not None and self._age(reused) > self._age(fresh) * self.weight):
            return self._reused.waiting.popitem(last=False)[0]
        return self._fresh.waiting.popitem(last=False)[0]

    def forget(self, key: bytes, place: Place) -> None:
        self.suspend(key, place)
        self.num_blocks -= 1

    def reinstate(self, key: bytes, place: Place) -> None:
        """A block that was forgotten by mistake."""
        self.num_blocks += 1
        self.resume(key, place)

    def remember_evicted(self, key: bytes, place: Place) -> None:
        """A forgotten block that went to make room."""
        self._list_of(place).ghosts[key] = self._uses
        while len(self._fresh.ghosts) + len(self._reused.ghosts) > GHOSTS_PER_BLOCK * max(self.num_blocks, 1):
            older = min(self._fresh, self._reused, key=_List.oldest_ghost)
            older.ghosts.popitem(last=False)

    def _list_of(self, place: Place) -> _List:
        return self._reused if place.reused else self._fresh

    def _age(self, place: Place) -> int:
        return self._uses - place.used_at

    def _came_back(self, key: bytes) -> bool:
        """Whether it was evicted not long ago; then the weight learns from it."""
        for of, sign in ((self._fresh, -1.0), (self._reused, 1.0)):
            if key in of.ghosts:
                self._learn(sign * min(MAX_STEP, ADAPTATION / len(of.ghosts)))
                del of.ghosts[key]
                return True
        return False

    def _learn(self, step: float) -> None:
        self.weight = min(MAX_WEIGHT, max(MIN_WEIGHT, self.weight * math.exp(step)))
