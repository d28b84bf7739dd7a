"""What is kept of each of many: of more than can be kept, those longest unheard of are forgotten. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class LastHeard(Generic[T]):
    """By name, in the order in which they were heard of last; `make` gives what a new one begins with."""

    def __init__(self, make: Callable[[], T], most: int) -> None:
        self._make = make
        self._most = most
        self._kept: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        """The longest unheard of first."""
        return iter(self._kept.items())

    def __reversed__(self) -> Iterator[tuple[str, T]]:
        return reversed(self._kept.items())

    def of(self, name: str) -> T:
        """It is heard of now."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self._make()
        self._kept.move_to_end(name)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return kept

    def get(self, name: str) -> T | None:
        """What is kept of it, which is not to hear of it."""
        return self._kept.get(name)
