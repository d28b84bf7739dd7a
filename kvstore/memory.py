"""The memory tier: proven slabs in an arena, under the books of an index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvstore.arena import Arena, Slot
from kvstore.block import BlockInfo, StoredBlock
from kvstore.index import TierIndex
from kvstore.quotas import Quotas

# Beyond the capacity, for blocks that were evicted while somebody still looks at them: who writes or sends them.
SLACK_BYTES = 96 << 20


@dataclass(slots=True, eq=False)
class Resident:
    """A block that is here. `block` looks into the arena; who keeps it keeps its slot, evicted or not."""

    info: BlockInfo
    block: StoredBlock
    offset: int
    last_used: float  # as the index has it; kept here for who is told of an eviction


class MemoryTier:
    """Bounded by slab bytes. One owner, the event loop.

    `on_evicted` is told of each block that makes room for another, while it still can be read.
    """

    def __init__(self, capacity_bytes: int, quotas: Quotas | None = None) -> None:
        self.index = TierIndex(capacity_bytes, quotas or Quotas())
        self.num_refused = 0
        self.on_evicted: Callable[[Resident], None] = _ignore
        self._arena = Arena(capacity_bytes + SLACK_BYTES if capacity_bytes else 0)
        self._residents: dict[bytes, Resident] = {}
        self._keys: dict[int, bytes] = {}  # of the slots' offsets

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def get(self, key: bytes) -> Resident | None:
        return self._residents.get(key)

    def add(self, info: BlockInfo, block: StoredBlock, now: float, keep: Collection[bytes] = ()) -> bool:
        """Keeps a copy, evicting others but `keep`; False, counted, if quota, pins or views leave no room, or
        its place in its chain cannot be."""
        if info.key in self:
            return True
        self.expire(now)
        accepted = self.index.accepts(info)
        evicted = self.index.make_room(block.num_bytes, info.tenant, now, (info.parent, *keep)) if accepted else None
        if evicted is not None:
            self._evict(evicted)
            slot = self._arena.take(block.num_bytes) or self._take_by_force(block.num_bytes, {info.parent, *keep}, now)
            if slot is not None:
                self._keep(info, block, slot, now)
                return True
        self.num_refused += 1
        return False

    def hit(self, keys: Collection[bytes], now: float) -> None:
        """A chain's blocks were used; those that are not here are passed over."""
        self.index.hit(keys, now)
        for key in keys:
            resident = self._residents.get(key)
            if resident is not None:
                resident.last_used = now

    def discard(self, key: bytes) -> dict[bytes, int]:
        """Drops the block and what follows it here; their slab bytes."""
        dropped = {gone: self._residents[gone].block.num_bytes for gone in self.index.discard(key)}
        self._drop(dropped)
        return dropped

    def expire(self, now: float) -> list[bytes]:
        """Drops what has outlived its time."""
        keys = self.index.expire(now)
        self._drop(keys)
        return keys

    def check(self) -> None:
        """Raises AssertionError unless books, blocks and arena agree."""
        self.index.check()
        self._arena.check()
        assert set(self.index) == self._residents.keys() == set(self._keys.values())
        assert all(self._keys[resident.offset] == key for key, resident in self._residents.items())

    def _keep(self, info: BlockInfo, block: StoredBlock, slot: Slot, now: float) -> None:
        slot.view[:] = block.payload
        kept = StoredBlock(slot.view.toreadonly(), block.checksum)
        self.index.add(info, block.num_bytes, now)
        self._residents[info.key] = Resident(info, kept, slot.offset, now)
        self._keys[slot.offset] = info.key

    def _take_by_force(self, num_bytes: int, keep: Collection[bytes], now: float) -> Slot | None:
        """There are bytes enough, but slabs of other sizes lie between them, or somebody still looks at them."""
        offsets = self._arena.window(num_bytes, lambda offset: self._may_go(offset, keep, now))
        for offset in offsets or ():
            key = self._keys.get(offset)
            if key is not None:  # else it went along with one before it
                keys = self.index.discard(key)
                self.index.num_evictions += len(keys)
                self._evict(keys)
        return self._arena.take(num_bytes)

    def _may_go(self, offset: int, keep: Collection[bytes], now: float) -> bool:
        """Whether the slot's block, and so all that follow it, may be dropped."""
        key = self._keys.get(offset)
        if key is None:
            return False
        going = self.index.select(key=key, now=now)
        return not any(one in keep or self.index.pinned_until(one) > now for one in going)

    def _evict(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.on_evicted(self._residents[key])
            self._drop((key,))

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self._keys[self._residents.pop(key).offset]


def _ignore(resident: Resident) -> None:
    """Nobody writes what leaves."""
