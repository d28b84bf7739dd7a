"""Which blocks follow which: a tier's chains, kept so that one is taken down from its tail."""

from __future__ import annotations

from collections.abc import Iterator


class Chains:
    """Edges from a parent's key to the keys that follow it. A parent need not be here itself."""

    def __init__(self) -> None:
        self._followers: dict[bytes, set[bytes]] = {}

    def link(self, key: bytes, parent: bytes) -> None:
        self._followers.setdefault(parent, set()).add(key)

    def unlink(self, key: bytes, parent: bytes) -> None:
        followers = self._followers[parent]
        followers.remove(key)
        if not followers:
            del self._followers[parent]

    def is_tail(self, key: bytes) -> bool:
        """Whether nothing here follows the block."""
        return key not in self._followers

    def num_edges(self) -> int:
        return sum(map(len, self._followers.values()))

    def deepest_first(self, key: bytes) -> list[bytes]:
        """The block and all that follow it; each comes after what follows it."""
        found = list(self._walk(key))
        found.reverse()
        return found

    def _walk(self, key: bytes) -> Iterator[bytes]:
        """Parents before their followers; no recursion, a chain may have 65,536 blocks."""
        upcoming = [key]
        while upcoming:
            parent = upcoming.pop()
            yield parent
            upcoming.extend(self._followers.get(parent, ()))
