"""When each namespace was used last: those of models and layouts that nobody runs any more age out."""

from __future__ import annotations

from kvstore.block import NAMESPACE_BYTES


class NamespaceAges:
    """Pure; times are monotonic seconds. `ttl_s` of 0: none ever ages out."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._last_used: dict[bytes, float] = {}

    def used(self, key: bytes, now: float) -> None:
        """A block of the namespace was put or served."""
        namespace = key[:NAMESPACE_BYTES]
        self._last_used[namespace] = max(now, self._last_used.get(namespace, now))

    def pop_old(self, now: float) -> list[bytes]:
        """Namespaces whose time is over, forgotten here."""
        if not self._ttl_s:
            return []
        old = [namespace for namespace, used in self._last_used.items() if now - used > self._ttl_s]
        for namespace in old:
            del self._last_used[namespace]
        return old
