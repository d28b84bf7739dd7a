"""Which blocks go to disk, and when: through, back, or once they are worth it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from kvstore.block import BlockInfo, StoredBlock
from kvstore.memory import MemoryTier, Resident
from kvstore.writer import DiskWriter


class WritePolicy(Enum):
    THROUGH = "through"  # every block, as it comes
    BACK = "back"  # when it leaves memory, and all at the end
    REUSE = "reuse"  # when it was served often enough


class Placement:
    """A block goes to disk after those before it in its chain: without them it would be of no use there."""

    def __init__(self, memory: MemoryTier, writer: DiskWriter, policy: WritePolicy, reuse_hits: int) -> None:
        self._memory = memory
        self._writer = writer
        self._policy = policy
        self._reuse_hits = reuse_hits
        if policy is WritePolicy.BACK:
            memory.on_evicted = self._on_evicted

    async def put(self, info: BlockInfo, block: StoredBlock) -> bool:
        """After the memory tier had its chance; whether the block is on its way to disk now, or is there."""
        if info.key in self._writer:
            return True
        resident = self._memory.get(info.key)
        if resident is None and self._policy is WritePolicy.REUSE:
            return False
        if resident is not None and self._policy is not WritePolicy.THROUGH:
            return False
        for before in self._unwritten(info):
            if not await self._writer.add(before.info, before.block, self._pinned_until(before.info.key)):
                return False
        # What waits for the disk alone is a copy: a view would keep the whole message that it came in.
        kept = StoredBlock(bytes(block.payload), block.checksum) if resident is None else resident.block
        return await self._writer.add(info, kept, self._pinned_until(info.key))

    def served(self, keys: Iterable[bytes]) -> None:
        """Blocks were used, and their hits counted."""
        if self._policy is not WritePolicy.REUSE:
            return
        for key in keys:
            resident = self._memory.get(key)
            if resident is not None and key not in self._writer and self._is_worth(key):
                self._offer([*self._unwritten(resident.info), resident])

    async def write_back(self) -> None:
        """Hands over what is in memory alone, where the policy says that it is to outlive the process."""
        if self._policy is not WritePolicy.BACK:
            return
        for key in sorted(self._memory.index, key=lambda key: self._memory.index.info(key).chain_index):
            resident = self._memory.get(key)
            if resident is not None:
                await self._add(resident)

    async def _add(self, resident: Resident) -> None:
        if resident.info.key not in self._writer:
            await self._writer.add(resident.info, resident.block, self._pinned_until(resident.info.key))

    def _is_worth(self, key: bytes) -> bool:
        return self._memory.index.hits(key) >= self._reuse_hits

    def _on_evicted(self, resident: Resident) -> None:
        """Its slot is wanted now, and perhaps those before it are next: what the writer gets are copies."""
        if resident.info.key not in self._writer:
            self._offer(map(_copy, [*self._unwritten(resident.info), resident]))

    def _offer(self, residents: Iterable[Resident]) -> None:
        for one in residents:
            if not self._writer.offer(one.info, one.block, self._pinned_until(one.info.key)):
                return

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

    def _pinned_until(self, key: bytes) -> float:
        index = self._memory.index
        return index.pinned_until(key) if key in index else 0.0


def _copy(resident: Resident) -> Resident:
    block = StoredBlock(bytes(resident.block.payload), resident.block.checksum)
    return Resident(resident.info, block, resident.offset)
