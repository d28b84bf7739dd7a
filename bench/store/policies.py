"""Policies that the store's own is measured against, as their papers have them, over blocks of one size.

Each orders the blocks that may go; which may, is the same for all: a block that another one follows stays (as in
kvstore.index), else a policy would be charged for holes in chains and not for its choices.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Protocol

NOWHERE = -1  # the parent of a first block


class Order(Protocol):
    """Of the blocks that may go. `pop` names the next one, which is gone then."""

    def enter(self, block: int) -> None: ...
    def hit(self, block: int) -> None: ...
    def suspend(self, block: int) -> None: ...
    def resume(self, block: int) -> None: ...
    def pop(self) -> int: ...
    def forget(self, block: int) -> None: ...


class TailCache:
    """`capacity` blocks in chains, of which the tail that `order` names goes first."""

    def __init__(self, capacity: int, order: Order) -> None:
        self._capacity = capacity
        self._order = order
        self._parents: dict[int, int] = {}
        self._num_followers: dict[int, int] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._parents

    def hit(self, block: int) -> None:
        self._order.hit(block)

    def put(self, block: int, parent: int) -> None:
        """Not if its parent is not here, or if only the parent could go."""
        if parent != NOWHERE and parent not in self._parents:
            return
        self._follow(parent)
        try:
            while len(self._parents) >= self._capacity:
                self._drop(self._order.pop())
        except KeyError:
            self._unfollow(parent)
            return
        self._parents[block] = parent
        self._num_followers[block] = 0
        self._order.enter(block)

    def _follow(self, parent: int) -> None:
        if parent in self._parents:
            if not self._num_followers[parent]:
                self._order.suspend(parent)
            self._num_followers[parent] += 1

    def _drop(self, block: int) -> None:
        self._order.forget(block)
        del self._num_followers[block]
        self._unfollow(self._parents.pop(block))

    def _unfollow(self, parent: int) -> None:
        if parent in self._parents:
            self._num_followers[parent] -= 1
            if not self._num_followers[parent]:
                self._order.resume(parent)


class Fifo:
    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()

    def enter(self, block: int) -> None:
        self._waiting[block] = None

    def hit(self, block: int) -> None:
        pass

    def suspend(self, block: int) -> None:
        self._waiting.pop(block, None)

    def resume(self, block: int) -> None:
        self._waiting[block] = None
        self._waiting.move_to_end(block, last=False)

    def pop(self) -> int:
        return self._waiting.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        pass


class Lru(Fifo):
    def hit(self, block: int) -> None:
        if block in self._waiting:
            self._waiting.move_to_end(block)


class Lfu:
    """The least often used since it came, of those the least recently."""

    def __init__(self) -> None:
        self._clock = 0
        self._uses: dict[int, tuple[int, int]] = {}  # how often, when last
        self._may_go: set[int] = set()
        self._heap: list[tuple[tuple[int, int], int]] = []

    def enter(self, block: int) -> None:
        self._use(block, 0)
        self.resume(block)

    def hit(self, block: int) -> None:
        self._use(block, self._uses[block][0] + 1)
        if block in self._may_go:
            self.resume(block)

    def suspend(self, block: int) -> None:
        self._may_go.discard(block)

    def resume(self, block: int) -> None:
        self._may_go.add(block)
        heapq.heappush(self._heap, (self._uses[block], block))

    def pop(self) -> int:
        while self._heap:
            uses, block = heapq.heappop(self._heap)
            if block in self._may_go and self._uses[block] == uses:
                return block
        raise KeyError("no block may go")

    def forget(self, block: int) -> None:
        self._may_go.discard(block)
        del self._uses[block]

    def _use(self, block: int, count: int) -> None:
        self._clock += 1
        self._uses[block] = (count, self._clock)


class _Lists:
    """Two lists; which of them a block is in outlives its being suspended."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lists: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]] = (OrderedDict(), OrderedDict())
        self._list_of: dict[int, int] = {}
        self._sizes = [0, 0]  # suspended ones too

    def suspend(self, block: int) -> None:
        self._lists[self._list_of[block]].pop(block, None)

    def resume(self, block: int) -> None:
        waiting = self._lists[self._list_of[block]]
        waiting[block] = None
        waiting.move_to_end(block, last=False)

    def _join(self, block: int, number: int, *, waiting: bool) -> None:
        self._list_of[block] = number
        self._sizes[number] += 1
        if waiting:
            self._lists[number][block] = None

    def _leave(self, block: int) -> tuple[int, bool]:
        """The list it was in, and whether it waited there."""
        number = self._list_of.pop(block)
        self._sizes[number] -= 1
        waited = block in self._lists[number]
        self._lists[number].pop(block, None)
        return number, waited

    def _pop_from(self, first: int) -> int:
        for number in (first, 1 - first):
            if self._lists[number]:
                return self._lists[number].popitem(last=False)[0]
        raise KeyError("no block may go")


class Arc(_Lists):
    """Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._target = 0.0  # of the first list

    def enter(self, block: int) -> None:
        once, often = self._ghosts
        seen = True
        if block in once:
            self._target = min(self._capacity, self._target + max(1.0, len(often) / len(once)))
            del once[block]
        elif block in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
            del often[block]
        else:
            seen = False
        self._join(block, int(seen), waiting=True)

    def hit(self, block: int) -> None:
        _, waited = self._leave(block)
        self._join(block, 1, waiting=waited)

    def pop(self) -> int:
        return self._pop_from(0 if self._sizes[0] > self._target else 1)

    def forget(self, block: int) -> None:
        number, _ = self._leave(block)
        self._ghosts[number][block] = None
        once, often = self._ghosts
        while once and len(once) + self._sizes[0] > self._capacity:
            once.popitem(last=False)
        while often and len(once) + len(often) > self._capacity:
            often.popitem(last=False)


class S3Fifo(_Lists):
    """Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023: a tenth for what is new."""

    SMALL = 0.1
    MAX_COUNT = 3

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._counts: dict[int, int] = {}

    def enter(self, block: int) -> None:
        ghosts = self._ghosts[0]
        self._counts[block] = 0
        self._join(block, int(block in ghosts), waiting=True)
        ghosts.pop(block, None)

    def hit(self, block: int) -> None:
        self._counts[block] = min(self.MAX_COUNT, self._counts[block] + 1)

    def pop(self) -> int:
        while True:
            block = self._pop_from(0 if self._sizes[0] >= self.SMALL * self._capacity else 1)
            count = self._counts[block]
            number = self._list_of[block]
            if count <= (1 if number == 0 else 0):
                return block
            self._leave(block)
            self._join(block, 1, waiting=True)
            self._counts[block] = 0 if number == 0 else count - 1

    def forget(self, block: int) -> None:
        del self._counts[block]
        number, _ = self._leave(block)
        ghosts = self._ghosts[0]
        if number == 0:
            ghosts[block] = None
        while len(ghosts) > self._capacity:
            ghosts.popitem(last=False)


class Cache(Container[int], Protocol):
    def hit(self, block: int) -> None: ...
    def put(self, block: int, parent: int) -> None: ...


POLICIES: dict[str, Callable[[int], Cache]] = {
    "FIFO": lambda capacity: TailCache(capacity, Fifo()),
    "LFU": lambda capacity: TailCache(capacity, Lfu()),
    "S3-FIFO": lambda capacity: TailCache(capacity, S3Fifo(capacity)),
    "ARC": lambda capacity: TailCache(capacity, Arc(capacity)),
    "LRU": lambda capacity: TailCache(capacity, Lru()),
}
