"""The memory tier: slabs as they came off the wire, least recently used first out."""

from __future__ import annotations

from kvstore.block import StoredBlock
from kvstore.eviction import ByteLRU


class MemoryTier:
    """Bounded by slab bytes. One owner, the event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.lru = ByteLRU(capacity_bytes)
        self.num_evictions = 0
        self._blocks: dict[bytes, StoredBlock] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> StoredBlock | None:
        return self._blocks.get(key)

    def add(self, key: bytes, block: StoredBlock) -> bool:
        """Keeps the block, evicting older ones; False if it is larger than the whole tier."""
        if block.num_bytes > self.lru.capacity_bytes:
            return False
        self.discard(key)
        for evicted in self.lru.make_room(block.num_bytes):
            del self._blocks[evicted]
            self.num_evictions += 1
        self.lru.add(key, block.num_bytes)
        self._blocks[key] = block
        return True

    def discard(self, key: bytes) -> None:
        self.lru.discard(key)
        self._blocks.pop(key, None)
