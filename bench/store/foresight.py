"""The order of one who knows what will be asked for: how far any policy could get."""

from __future__ import annotations

import heapq
from collections import defaultdict

from bench.store.policies import TailCache

NEVER = 1 << 62


class Foresight:
    """Belady's: what is used again last goes first; `clock` is the number of the request that is being served."""

    def __init__(self, requests: list[list[int]]) -> None:
        self.clock = 0
        self._uses: dict[int, list[int]] = defaultdict(list)  # those to come, last first
        for number, blocks in enumerate(requests):
            for block in blocks:
                self._uses[block].append(number)
        for uses in self._uses.values():
            uses.reverse()
        self._may_go: set[int] = set()
        self._heap: list[tuple[int, int]] = []

    def next_use(self, block: int) -> int:
        uses = self._uses[block]
        while uses and uses[-1] <= self.clock:
            uses.pop()
        return uses[-1] if uses else NEVER

    def enter(self, block: int) -> None:
        self.resume(block)

    def hit(self, block: int) -> None:
        if block in self._may_go:
            self.resume(block)

    def suspend(self, block: int) -> None:
        self._may_go.discard(block)

    def resume(self, block: int) -> None:
        self._may_go.add(block)
        heapq.heappush(self._heap, (-self.next_use(block), block))

    def pop(self) -> int:
        while self._heap:
            use, block = heapq.heappop(self._heap)
            if block in self._may_go and -use == self.next_use(block):
                return block
        raise KeyError("no block may go")

    def forget(self, block: int) -> None:
        self._may_go.discard(block)


class ForesightCache:
    """Stores nothing that nobody will ask for."""

    def __init__(self, capacity: int, requests: list[list[int]]) -> None:
        self._order = Foresight(requests)
        self._cache = TailCache(capacity, self._order)

    def begin(self, number: int) -> None:
        """The request of that number is served now."""
        self._order.clock = number

    def __contains__(self, block: object) -> bool:
        return block in self._cache

    def hit(self, block: int) -> None:
        self._cache.hit(block)

    def put(self, block: int, parent: int) -> None:
        if self._order.next_use(block) != NEVER:
            self._cache.put(block, parent)
