"""Which blocks follow which: a tier's chains, kept so that one is taken down from its tail."""

from __future__ import annotations

from collections.abc import Collection, Iterator


class Chains:
    """Edges from a parent's key to the keys that follow it. A parent need not be here itself."""

    def __init__(self) -> None:
        # One follower is by far the most common number, and a set of one would be a third of what the books take.
        self._followers: dict[bytes, bytes | set[bytes]] = {}

    def link(self, key: bytes, parent: bytes) -> None:
        followers = self._followers.setdefault(parent, key)
        if isinstance(followers, set):
            followers.add(key)
        elif followers != key:
            self._followers[parent] = {followers, key}

    def unlink(self, key: bytes, parent: bytes) -> None:
        followers = self._followers[parent]
        if not isinstance(followers, set):
            del self._followers[parent]
            return
        followers.remove(key)
        if len(followers) == 1:
            self._followers[parent] = followers.pop()

    def is_tail(self, key: bytes) -> bool:
        """Whether nothing here follows the block."""
        return key not in self._followers

    def followers(self, parent: bytes) -> Collection[bytes]:
        """The keys that follow it at once."""
        followers = self._followers.get(parent, ())
        return (followers,) if isinstance(followers, bytes) else followers

    def num_edges(self) -> int:
        return sum(1 for parent in self._followers for _ in self.followers(parent))

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
            upcoming.extend(self.followers(parent))
