"""Which blocks give way when a tier is full: the least recently used, counted in bytes."""

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
