"""Keys with the times at which something is due for them."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Deadlines:
    """A heap whose entries may be older than the truth: a deadline that moves later costs nothing until it is met.

    `due_at` tells the present deadline of a key, None where there is none any more. A deadline that moves earlier
    must be set again. Setting costs O(log n); so does each deadline met; looking whether one is due costs O(1).
    """

    def __init__(self, due_at: Callable[[bytes], float | None]) -> None:
        self._due_at = due_at
        self._heap: list[tuple[float, bytes]] = []
        self._earliest: dict[bytes, float] = {}  # of the key's entries, the one that counts

    def set(self, key: bytes, at: float) -> None:
        if self._earliest.get(key, float("inf")) <= at:
            return
        self._earliest[key] = at
        heapq.heappush(self._heap, (at, key))

    def discard(self, key: bytes) -> None:
        self._earliest.pop(key, None)
        if len(self._heap) > 2 * len(self._earliest) + 8:  # what was discarded is thrown out once it is the larger part
            self._heap = [(at, kept) for kept, at in self._earliest.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> list[bytes]:
        """Keys whose deadline is at or before `now`; they have none until it is set again."""
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._earliest.get(key) != at:
                continue
            del self._earliest[key]
            present = self._due_at(key)
            if present is None:
                continue
            if present <= now:
                due.append(key)
            else:
                self.set(key, present)
        return due
