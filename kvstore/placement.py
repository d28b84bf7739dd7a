"""Which blocks go to disk, and when: through, back, or once they were served; if such blocks are ever used again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import Enum

from kvstore.block import BlockInfo, StoredBlock
from kvstore.memory import MemoryTier, Resident
from kvstore.pending import PendingBlock
from kvstore.reuse import Reuse
from kvstore.writer import DiskWriter


class WritePolicy(Enum):
    THROUGH = "through"  # every block, as it comes
    BACK = "back"  # when it leaves memory, and all at the end
    REUSE = "reuse"  # when it was served often enough


class Placement:
    """A block goes to disk after those before it in its chain: without them it would be of no use there.

    Whatever the policy, a place in a chain that was measured to be used again less often than `min_reuse` (a share)
    stays in memory; pinned blocks go to disk all the same.
    """

    def __init__(
        self, memory: MemoryTier, writer: DiskWriter, policy: WritePolicy, *, reuse_hits: int, min_reuse: float
    ) -> None:
        self.num_not_worth = 0  # blocks that did not go to disk for that
        self._memory = memory
        self._writer = writer
        self._policy = policy
        self._reuse_hits = reuse_hits
        self._reuse = Reuse(min_reuse)
        if policy is WritePolicy.BACK:
            memory.on_evicted = self._on_evicted

    async def put(self, info: BlockInfo, block: StoredBlock, now: float) -> bool:
        """After the memory tier had its chance; whether the block is on its way to disk now, or is there."""
        if info.key in self._writer:
            return True
        resident = self._memory.get(info.key)
        info = info if resident is None else resident.info  # whoever puts a block again does not make it his
        if resident is None and self._policy is WritePolicy.REUSE:
            return False
        if resident is not None and self._policy is not WritePolicy.THROUGH:
            return False
        if not self._is_worth(info):
            return False
        for before in self._unwritten(info):
            if self._memory.get(before.info.key) is not before or not await self._add(self._pending(before)):
                return False  # deleted while another one waited for the disk, or not taken by it
        if self._memory.get(info.key) is not resident:
            return False
        # What waits for the disk alone is a copy: a view would keep the whole message that it came in.
        if resident is not None:
            return await self._add(self._pending(resident))
        return await self._add(PendingBlock(info, StoredBlock(bytes(block.payload), block.checksum), now, 0.0))

    def served(self, keys: Iterable[bytes]) -> None:
        """Blocks were used, and their hits counted."""
        on_disk = self._writer.books.index
        for key in keys:
            if key in on_disk:
                if on_disk.hits(key) == 1:
                    self._reuse.reused(on_disk.info(key).chain_index)
            elif self._policy is WritePolicy.REUSE and key not in self._writer:
                self._write_if_served_enough(key)

    async def write_back(self) -> None:
        """Hands over what is in memory alone, where the policy says that it is to outlive the process.

        The caller bounds it: a slow disk is waited for.
        """
        if self._policy is not WritePolicy.BACK:
            return
        for key in sorted(self._memory.index, key=lambda key: self._memory.index.info(key).chain_index):
            resident = self._memory.get(key)
            if resident is not None and key not in self._writer and self._is_worth(resident.info):
                await self._add(self._pending(resident), patient=True)

    async def _add(self, pending: PendingBlock, *, patient: bool = False) -> bool:
        added = await self._writer.add(pending, patient=patient)
        if added:
            self._reuse.stored(pending.info.chain_index)
        return added

    def _write_if_served_enough(self, key: bytes) -> None:
        resident = self._memory.get(key)
        if resident is None or self._memory.index.hits(key) < self._reuse_hits:
            return
        if self._is_worth(resident.info):
            self._offer([*self._unwritten(resident.info), resident])

    def _is_worth(self, info: BlockInfo) -> bool:
        worth = self._reuse.worth(info.chain_index) or self._pinned_until(info.key) > 0.0
        self.num_not_worth += not worth
        return worth

    def _on_evicted(self, resident: Resident) -> None:
        """Its slot is wanted now, and perhaps those before it are next: what the writer gets are copies."""
        if resident.info.key not in self._writer and self._is_worth(resident.info):
            self._offer(map(_copy, [*self._unwritten(resident.info), resident]))

    def _offer(self, residents: Iterable[Resident]) -> None:
        for one in residents:
            if not self._writer.offer(self._pending(one)):
                return
            self._reuse.stored(one.info.chain_index)

    def _unwritten(self, info: BlockInfo) -> list[Resident]:
        """Those before it that memory alone has, the chain's first one first."""
        found = list(self._unwritten_backwards(info))
        found.reverse()
        return found

    def _unwritten_backwards(self, info: BlockInfo) -> Iterator[Resident]:
        while info.chain_index > 0 and info.parent not in self._writer:
            before = self._memory.get(info.parent)
            if before is None:
                return
            yield before
            info = before.info

    def _pending(self, one: Resident) -> PendingBlock:
        return PendingBlock(one.info, one.block, one.last_used, self._pinned_until(one.info.key))

    def _pinned_until(self, key: bytes) -> float:
        index = self._memory.index
        return index.pinned_until(key) if key in index else 0.0


def _copy(resident: Resident) -> Resident:
    block = StoredBlock(bytes(resident.block.payload), resident.block.checksum)
    return dataclasses.replace(resident, block=block)
