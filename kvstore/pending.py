"""Blocks that were accepted for the disk and are not on it yet, in the order they came in."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from kvstore import record
from kvstore.block import BlockInfo, StoredBlock
from kvstore.chains import Chains
from kvstore.deadlines import Deadlines


@dataclass(slots=True, eq=False)
class PendingBlock:
    info: BlockInfo
    block: StoredBlock
    last_used: float  # may change while it waits, as may
    pinned_until: float  # 0: not pinned

    @property
    def due_at(self) -> float | None:
        """When its time is over, or its pin if that ends later; None: never."""
        return max(self.last_used + self.info.ttl_s, self.pinned_until) if self.info.ttl_s else None

    @property
    def disk_bytes(self) -> int:
        """What the record will take of the file."""
        return disk_bytes(self.block.num_bytes)


class Pending:
    """A block is here, and served from here, until its transaction is done or it is cancelled."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of their slabs
        self._blocks: dict[bytes, PendingBlock] = {}
        self._queue: deque[PendingBlock] = deque()  # those of _blocks, and cancelled ones, that no transaction has
        self._expiries = Deadlines(lambda key: self._blocks[key].due_at)
        self._chains = Chains()

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def get(self, key: bytes) -> PendingBlock | None:
        return self._blocks.get(key)

    def has_queued(self) -> bool:
        """Whether `take` would find any."""
        while self._queue and not self.holds(self._queue[0]):
            self._queue.popleft()
        return bool(self._queue)

    def holds(self, pending: PendingBlock) -> bool:
        """Whether it is still to be written: not cancelled, nor put again since."""
        return self._blocks.get(pending.info.key) is pending

    def push(self, pending: PendingBlock) -> None:
        self._blocks[pending.info.key] = pending
        self.num_bytes += pending.block.num_bytes
        self._queue.append(pending)
        self._chains.link(pending.info.key, pending.info.parent)
        self._set_expiry(pending)

    def hit(self, keys: Iterable[bytes], now: float) -> None:
        for key in keys:
            pending = self._blocks.get(key)
            if pending is not None:
                pending.last_used = now

    def pin(self, keys: Iterable[bytes], until: float) -> None:
        for key in keys:
            pending = self._blocks.get(key)
            if pending is not None:
                pending.pinned_until = until
                self._set_expiry(pending)  # to unpin moves it earlier

    def expire(self, now: float, written: Container[bytes]) -> list[bytes]:
        """Forgets the blocks whose time is over while they wait; those being `written` are the books' affair."""
        expired = [key for key in self._expiries.pop_due(now) if key not in written]
        for key in expired:
            self.cancel(key)
        return expired

    def take(self, max_bytes: int) -> list[PendingBlock]:
        """The next ones, of that many bytes of the file or the first alone; they stay here until `done`."""
        batch: list[PendingBlock] = []
        num_bytes = 0
        while self.has_queued():
            num_bytes += self._queue[0].disk_bytes
            if batch and num_bytes > max_bytes:
                break
            batch.append(self._queue.popleft())
        return batch

    def done(self, batch: list[PendingBlock]) -> None:
        for pending in batch:
            if self.holds(pending):
                self.cancel(pending.info.key)

    def cancel(self, key: bytes) -> None:
        """Forgets the block, if it is here; a transaction that has it already goes on."""
        pending = self._blocks.pop(key, None)
        if pending is not None:
            self.num_bytes -= pending.block.num_bytes
            self._chains.unlink(key, pending.info.parent)
            self._expiries.discard(key)

    def drop(self, key: bytes) -> dict[bytes, int]:
        """Forgets the block and what follows it here, be it here itself or not; their slab bytes."""
        dropped: dict[bytes, int] = {}
        for one in self._chains.deepest_first(key):
            if one in self._blocks:
                dropped[one] = self._blocks[one].block.num_bytes
                self.cancel(one)
        return dropped

    def _set_expiry(self, pending: PendingBlock) -> None:
        if pending.due_at is not None:
            self._expiries.set(pending.info.key, pending.due_at)


def disk_bytes(slab_bytes: int) -> int:
    """What the record of such a slab takes of the file."""
    return record.record_pages(slab_bytes) * record.PAGE_BYTES
