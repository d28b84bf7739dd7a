"""The books of the disk tier: its index, and what is to be written down of each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from kvstore.block import BlockInfo
from kvstore.clock import StoreClock
from kvstore.disk import Scan
from kvstore.entry import Entry
from kvstore.index import TierIndex
from kvstore.pending import PendingBlock, disk_bytes
from kvstore.quotas import NO_BOUND, Quotas

NOBODY = ""  # for whom room is made when the disk itself is short of it; no tenant has this name


class DiskBooks:
    """`index` counts whole records, and has a block from when room was made for it until it is to be deleted.

    A method that takes blocks out of the index returns them, with their slab bytes, for the caller to delete.
    """

    def __init__(self, capacity_bytes: int, quotas: Quotas, now: Callable[[], float]) -> None:
        self.index = TierIndex(capacity_bytes, Quotas(quotas.default_bytes, {**quotas.by_tenant, NOBODY: NO_BOUND}))
        self._now = now
        self._slab_bytes: dict[bytes, int] = {}
        self._used: dict[bytes, None] = {}  # used or pinned since their entries were written, in order

    def restore(self, scan: Scan, clock: StoreClock) -> list[bytes]:
        """Takes over what an earlier process left; returns what cannot stay: too much, or without its parent."""
        now = self._now()
        gone = list(scan.strays)
        for entry in _newest_that_fit(scan.entries, self.index.capacity_bytes, gone):
            key, last_used = entry.info.key, min(now, clock.monotonic_of(entry.last_used_s))
            if not self.index.restore(entry.info, disk_bytes(entry.slab_bytes), last_used, entry.hits):
                gone.append(key)
                continue
            self._slab_bytes[key] = entry.slab_bytes
            if entry.pinned_until_s and clock.monotonic_of(entry.pinned_until_s) > now:
                self.index.pin([key], clock.monotonic_of(entry.pinned_until_s))
        orphans = [key for key in self.index if self._is_orphan(self.index.info(key))]
        for key in orphans:
            gone += self.drop(key)
        return [*gone, *self.expire()]

    def reserve(self, pending: PendingBlock) -> dict[bytes, int] | None:
        """Makes room for a block and enters it; None where quota or pins leave none, its parent is not here, or
        its place in its chain cannot be."""
        info = pending.info
        if self._is_orphan(info) or not self.index.accepts(info):
            return None
        now = self._now()
        evicted = self.index.make_room(pending.disk_bytes, info.tenant, now, (info.parent,))
        if evicted is None:
            return None
        gone = self._forget(evicted)
        self.index.add(info, pending.disk_bytes, pending.last_used)
        self._slab_bytes[info.key] = pending.block.num_bytes
        if pending.pinned_until > now:
            self.index.pin([info.key], pending.pinned_until)
        return gone

    def give_way(self, num_bytes: int) -> dict[bytes, int]:
        """Evicts as much, although the books have room; in its turn even a block that is about to be written."""
        free_bytes = self.index.capacity_bytes - self.index.used_bytes
        wanted = min(self.index.capacity_bytes, free_bytes + num_bytes)
        return self._forget(self.index.make_room(wanted, NOBODY, self._now()) or [])

    def drop(self, key: bytes) -> dict[bytes, int]:
        """The block and what follows it here."""
        return self._forget(self.index.discard(key))

    def clear(self) -> dict[bytes, int]:
        """All of them: the disk has lost everything."""
        gone: dict[bytes, int] = {}
        for key in list(self.index):
            gone |= self.drop(key)
        return gone

    def expire(self) -> dict[bytes, int]:
        """What has outlived its time."""
        return self._forget(self.index.expire(self._now()))

    def hit(self, keys: Iterable[bytes]) -> None:
        """A chain's blocks, from its root, were used."""
        here = [key for key in keys if key in self.index]
        self.index.hit(here, self._now())
        self._used.update(dict.fromkeys(here))

    def pin(self, keys: Iterable[bytes], until: float) -> None:
        here = [key for key in keys if key in self.index]
        self.index.pin(here, until)
        self._used.update(dict.fromkeys(here))

    def slab_bytes(self, key: bytes) -> int:
        """Raises KeyError if the block is not here."""
        return self._slab_bytes[key]

    def entry(self, key: bytes, clock: StoreClock) -> Entry:
        """What is to be written down now. Raises KeyError if the block is not here."""
        index = self.index
        pinned_until = index.pinned_until(key)
        return Entry(
            index.info(key),
            self._slab_bytes[key],
            clock.age_of(index.last_used(key)),
            index.hits(key),
            clock.age_of(pinned_until) if pinned_until > self._now() else 0.0,
        )

    @property
    def num_used(self) -> int:
        """Entries that are to be written anew."""
        return len(self._used)

    def take_used(self, limit: int, clock: StoreClock) -> list[Entry]:
        """Some of those entries; the caller writes them, or loses how recent they are."""
        keys = list(islice(self._used, limit))
        for key in keys:
            del self._used[key]
        return [self.entry(key, clock) for key in keys]

    def _is_orphan(self, info: BlockInfo) -> bool:
        return info.chain_index > 0 and info.parent not in self.index

    def _forget(self, keys: list[bytes]) -> dict[bytes, int]:
        for key in keys:
            self._used.pop(key, None)
        return {key: self._slab_bytes.pop(key) for key in keys}


def _newest_that_fit(entries: Iterable[Entry], capacity_bytes: int, gone: list[bytes]) -> list[Entry]:
    """Oldest first, and of one age the followers first; those beyond the capacity go to `gone`."""
    fitting: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (-entry.last_used_s, entry.info.chain_index)):
        capacity_bytes -= disk_bytes(entry.slab_bytes)
        if capacity_bytes >= 0:
            fitting.append(entry)
        else:
            gone.append(entry.info.key)
    fitting.reverse()
    return fitting
