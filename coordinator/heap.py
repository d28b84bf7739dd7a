"""The least of many, any of which may leave or be ranked anew. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[Any, ...]

_SLACK = 16  # stale entries that are not worth a sweep


class Heap(Generic[T]):
    """Items by key, equal keys in the order they were ranked. Each operation is O(log n), some only on average: an
    entry that was left behind is dropped when it comes to the top, or when such entries are the majority."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, T]] = []
        self._current: dict[T, int] = {}  # the serial of each item's valid entry
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[T]:
        """In no order."""
        return iter(self._current)

    def __contains__(self, item: T) -> bool:
        return item in self._current

    def rank(self, item: T, key: Key) -> None:
        """Puts the item in, or in a new place, behind those of the same key."""
        serial = next(self._serials)
        self._current[item] = serial
        heapq.heappush(self._entries, (key, serial, item))
        self._sweep()

    def remove(self, item: T) -> bool:
        """Whether it was in."""
        if self._current.pop(item, None) is None:
            return False
        self._sweep()
        return True

    def least(self) -> T | None:
        """The first one, which stays; None when nobody is in."""
        while self._entries and not self._is_valid(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def key_of_least(self) -> Key:
        """Raises IndexError when nobody is in."""
        self.least()
        return self._entries[0][0]

    def _is_valid(self, entry: tuple[Key, int, T]) -> bool:
        return self._current.get(entry[2]) == entry[1]

    def _sweep(self) -> None:
        if len(self._entries) > 2 * len(self._current) + _SLACK:
            self._entries = [entry for entry in self._entries if self._is_valid(entry)]
            heapq.heapify(self._entries)
