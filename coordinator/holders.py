"""Which nodes hold which blocks, in little memory: a set of nodes is an int with a bit for each. Pure.

Blocks are known by 60 bits of their hashes, which Python keeps in 32 bytes where the hash takes 65. Among a million
blocks, a hash that none of them has is taken for one of them once in 10^12 times. Then a request is sent where its
prefix is not: the node compares whole hashes, and computes what it lacks; nothing but time is lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvrelay.types import BlockHash

_SHARD_BITS = 6  # a dict that grows is copied, all of it at once: 64 small ones never hold anybody up for long
SHARD_SHIFT = 60 - _SHARD_BITS
_MAX_SHARED = 16_384


def keys_of(hashes: Sequence[BlockHash]) -> list[int]:
    """Of hashes of 32 bytes each. Equal ones have equal keys, in one process."""
    return [word >> 4 for word in array("Q", b"".join(hashes))[::4]]


class Holders:
    """The nodes that hold each block. A node is an int with one bit set, always the same object.

    `lookups[key >> SHARD_SHIFT](key, 0)` is the set of those who hold the block: a method would cost as much again.
    """

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << _SHARD_BITS)]
        self.lookups: list[Callable[[int, int], int]] = [shard.get for shard in self._shards]
        self._shared: dict[int, int] = {}  # sets of several nodes: equal ones are one object, most of the time

    def __len__(self) -> int:
        """Blocks that anyone holds."""
        return sum(map(len, self._shards))

    def add(self, keys: Sequence[int], node: int) -> list[int]:
        """Gives those of `keys` that the node did not hold until now."""
        new = []
        shards = self._shards
        for key in keys:
            shard = shards[key >> SHARD_SHIFT]
            held = shard.get(key, 0)
            if not held & node:
                shard[key] = self._share(held | node) if held else node
                new.append(key)
        return new

    def discard(self, keys: Sequence[int], node: int) -> list[int]:
        """Gives those of `keys` that the node held until now."""
        gone = []
        shards = self._shards
        for key in keys:
            shard = shards[key >> SHARD_SHIFT]
            held = shard.get(key, 0)
            if held == node:
                del shard[key]
                gone.append(key)
            elif held & node:
                shard[key] = self._share(held ^ node)
                gone.append(key)
        return gone

    def _share(self, nodes: int) -> int:
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()  # of those that are in use, one more object each
        return self._shared.setdefault(nodes, nodes)
