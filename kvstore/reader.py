"""Reading through the tiers: memory first, the disk ahead of what is due; every block proven as it is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.errors import CorruptBlockError
from kvrelay.types import Tier
from kvstore.block import StoredBlock
from kvstore.disk import DiskFailedError, DiskTier
from kvstore.memory import MemoryTier
from kvstore.read_ahead import Job, ReadAhead
from kvstore.upkeep import Upkeep
from kvstore.writer import DiskWriter

READER_THREADS = 2

logger = logging.getLogger(__name__)


class Reader:
    """Belongs to the event loop; its threads run `read_many` of the disk tier, for itself and for others.

    `hits` counts blocks served by tier, `num_misses` reads that ended for want of a block.
    """

    def __init__(
        self, memory: MemoryTier, disk: DiskTier | None, writer: DiskWriter | None, now: Callable[[], float]
    ) -> None:
        self.threads = ThreadPoolExecutor(READER_THREADS, "kvstore-reader")
        self.hits = {Tier.MEMORY: 0, Tier.DISK: 0}
        self.num_misses = 0
        self.num_corrupt = 0
        self._memory = memory
        self._disk = disk
        self._writer = writer
        self._now = now

    def tier_of(self, key: bytes) -> Tier:
        """By the books alone."""
        if key in self._memory or (self._writer is not None and key in self._writer.pending):
            return Tier.MEMORY
        if self._writer is not None and key in self._writer.books.index:
            return Tier.DISK
        return Tier.NONE

    async def read(self, keys: Sequence[bytes], upkeep: Upkeep) -> AsyncGenerator[tuple[StoredBlock, Tier], None]:
        """The blocks in order, until the first that is not here or fails its proof, which is dropped."""
        ahead = ReadAhead(keys, self._size_on_disk, self._begin)
        try:
            for position, key in enumerate(keys):
                ahead.advance(position)
                found = self._read_memory(key) or await self._read_disk(key, ahead, upkeep)
                if found is None:
                    self.num_misses += 1
                    return
                ahead.skip(key)
                self.hits[found[1]] += 1
                yield found
                del found  # the slot is free once whoever took it is done
        finally:
            ahead.close()

    def _read_memory(self, key: bytes) -> tuple[StoredBlock, Tier] | None:
        held = self._memory.get(key) or (None if self._writer is None else self._writer.pending.get(key))
        if held is None:
            return None
        try:
            held.block.verify()
        except CorruptBlockError as error:
            self._count_corrupt(Tier.MEMORY, error)
            self._memory.discard(key)
            if self._writer is not None:
                self._writer.pending.cancel(key)  # they are the same bytes
            return None
        return held.block, Tier.MEMORY

    async def _read_disk(self, key: bytes, ahead: ReadAhead, upkeep: Upkeep) -> tuple[StoredBlock, Tier] | None:
        """From a job of the read-ahead, or from one of its own where the block left memory meanwhile."""
        if self._writer is None or not (ahead.reads(key) or self._size_on_disk(key)):
            return None
        found = await ahead.take(key) if ahead.reads(key) else (await self._begin([key]))[0]
        if isinstance(found, DiskFailedError):
            logger.warning("kvstore: %s", found)
            return None
        if self.tier_of(key) is not Tier.DISK:
            return self._read_memory(key)  # deleted, expired or put anew while it was read
        if not isinstance(found, StoredBlock):
            self._count_corrupt(Tier.DISK, found or CorruptBlockError("a record is not where it was written"))
            upkeep.drop_from_disk([key])
            return None
        self._memory.add(self._writer.books.index.info(key), found, self._now())
        return found, Tier.DISK

    def _size_on_disk(self, key: bytes) -> int:
        """Slab bytes if the block is on disk alone, else 0."""
        return self._writer.books.slab_bytes(key) if self._writer and self.tier_of(key) is Tier.DISK else 0

    def _begin(self, keys: Sequence[bytes]) -> Job:
        if self._disk is None:
            raise LookupError("a store without a disk tier reads none")
        return asyncio.get_running_loop().run_in_executor(self.threads, self._disk.read_many, keys)

    def _count_corrupt(self, tier: Tier, error: CorruptBlockError) -> None:
        self.num_corrupt += 1
        logger.warning("kvstore dropped a block from %s: %s", tier.value, error)
