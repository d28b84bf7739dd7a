"""Which blocks give way when a tier is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class ByteLRU:
    """Keys with their sizes, bounded by the sum of the sizes. Holds no blocks itself.

    `used_bytes` never exceeds `capacity_bytes`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # oldest first

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        """Oldest first."""
        return iter(self._sizes)

    def make_room(self, num_bytes: int) -> list[bytes]:
        """Forgets the oldest keys until `num_bytes` more fit, or all; returns them for the caller to drop."""
        return self.pop_oldest(self.used_bytes + num_bytes - self.capacity_bytes)

    def pop_oldest(self, num_bytes: int) -> list[bytes]:
        """Forgets the oldest keys until they come to `num_bytes`, or all."""
        popped: list[bytes] = []
        target = self.used_bytes - num_bytes
        while self._sizes and self.used_bytes > target:
            key, size = self._sizes.popitem(last=False)
            self.used_bytes -= size
            popped.append(key)
        return popped

    def add(self, key: bytes, num_bytes: int) -> None:
        """As the most recently used. The caller made room; raises ValueError if it did not."""
        self.discard(key)
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise ValueError(f"{num_bytes} bytes do not fit: {self.used_bytes} of {self.capacity_bytes} are used")
        self._sizes[key] = num_bytes
        self.used_bytes += num_bytes

    def discard(self, key: bytes) -> None:
        self.used_bytes -= self._sizes.pop(key, 0)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Makes the keys that are here the most recently used, the last one most of all."""
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)


class EvictionQueue:
    """One tenant's blocks in the order in which they would go. Only the tails of chains that nobody pinned wait in it.

    Knows neither chains nor sizes of a tier: its owner takes a block out when something follows it, and puts it back,
    to be looked at next, when what followed has gone. Every call costs O(1).
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, None] = OrderedDict()  # next to go first

    def __bool__(self) -> bool:
        """Whether a block could go."""
        return bool(self._waiting)

    def __contains__(self, key: object) -> bool:
        return key in self._waiting

    def enter(self, key: bytes) -> None:
        """A new block, or one that was used since it last waited here."""
        self._waiting[key] = None
        self._waiting.move_to_end(key)

    def enter_next(self, key: bytes) -> None:
        """A block of which the next `pop` is to think first."""
        self._waiting[key] = None
        self._waiting.move_to_end(key, last=False)

    def leave(self, key: bytes) -> None:
        self._waiting.pop(key, None)

    def hit(self, key: bytes) -> None:
        if key in self._waiting:
            self._waiting.move_to_end(key)

    def pop(self) -> bytes:
        """The block to go, no longer here. Raises KeyError when nothing waits."""
        return self._waiting.popitem(last=False)[0]
