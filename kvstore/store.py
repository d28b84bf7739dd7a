"""The tiers together: match, get and put of proven blocks.

Written through: a block enters memory at once and the disk soon after. Read through: a block found on disk enters
memory. What fails its proof is a miss, is counted, and is dropped from its tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import islice, takewhile

from kvrelay.errors import CorruptBlockError
from kvrelay.types import Tier
from kvstore.block import BlockInfo, StoredBlock
from kvstore.disk import DiskFailedError, DiskTier
from kvstore.listing import HeldBlock, Progress, TenantHoldings
from kvstore.memory import MemoryTier
from kvstore.selector import Selector
from kvstore.writer import DiskWriter

READ_AHEAD = 4  # blocks of a Get that are read while earlier ones are being sent
READER_THREADS = 2

logger = logging.getLogger(__name__)


class PutOutcome(Enum):
    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"  # empty, corrupt, or larger than every tier


@dataclass(frozen=True, slots=True)
class TierHoldings:
    """Sizes are slab bytes in memory, whole records on disk."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the process started."""

    memory: TierHoldings
    disk: TierHoldings
    misses: int
    corrupt: int
    write_failures: int
    expired: int = 0
    num_pinned: int = 0
    file_bytes: int = 0
    tenants: tuple[TenantHoldings, ...] = ()  # those that hold most first


class Store:
    """Keys are `namespace_key` + block hash. One owner, the event loop; reads from disk run on threads of its own."""

    def __init__(self, memory: MemoryTier, disk: DiskTier | None, now: Callable[[], float]) -> None:
        self._memory = memory
        self._disk = disk
        self._writer = None if disk is None else DiskWriter(disk, now)
        self._readers = ThreadPoolExecutor(READER_THREADS, "kvstore-reader")
        self._hits = {Tier.MEMORY: 0, Tier.DISK: 0}
        self._num_misses = 0
        self._num_corrupt = 0

    async def start(self) -> None:
        if self._writer is not None:
            await self._writer.start()

    async def flush(self, timeout_s: float) -> None:
        """Waits until every accepted block is on disk or was refused by it. Raises TimeoutError."""
        if self._writer is not None:
            await self._writer.flush(timeout_s)

    async def close(self) -> None:
        self._readers.shutdown()
        if self._writer is not None:
            await self._writer.close()

    def match(self, keys: Sequence[bytes]) -> list[Tier]:
        """Where each block is, by the books alone; NONE where it is not. Changes nothing, not even the age."""
        return [self._tier_of(key) for key in keys]

    def match_prefix(self, keys: Sequence[bytes]) -> list[Tier]:
        """Tiers of the longest prefix that is here; what is asked for beyond it counts as missed."""
        tiers = list(takewhile(lambda tier: tier is not Tier.NONE, map(self._tier_of, keys)))
        self._num_misses += len(keys) - len(tiers)
        return tiers

    async def get(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[StoredBlock, Tier], None]:
        """The blocks in order, each proven now, until the first that is not here or fails its proof."""
        upcoming = iter(keys)
        reads = deque(asyncio.ensure_future(self._read(key)) for key in islice(upcoming, READ_AHEAD))
        num_served = 0
        try:
            while reads:
                found = await reads.popleft()
                if found is None:
                    self._num_misses += 1
                    return
                reads.extend(asyncio.ensure_future(self._read(key)) for key in islice(upcoming, 1))
                self._hits[found[1]] += 1
                num_served += 1
                yield found
        finally:
            for read in reads:
                read.cancel()
            self.touch(keys[:num_served])

    async def put(self, info: BlockInfo, block: StoredBlock) -> PutOutcome:
        """REFUSED where the block before it is not held, except for a first one (chain_index 0)."""
        key = info.key
        if block.num_bytes == 0:
            return PutOutcome.REFUSED
        try:
            block.verify()
        except CorruptBlockError:
            self._num_corrupt += 1
            return PutOutcome.REFUSED
        present = self._tier_of(key) is not Tier.NONE
        kept = present or self._memory.add(key, block)
        if self._writer is not None and key not in self._writer:
            kept = await self._writer.add(key, block) or kept
        if not kept:
            return PutOutcome.REFUSED
        return PutOutcome.PRESENT if present else PutOutcome.STORED

    def touch(self, keys: Sequence[bytes]) -> None:
        """Makes a chain's blocks recently used, the first one most of all: without it the others are of no use."""
        self._memory.lru.touch(reversed(keys))
        if self._writer is not None:
            self._writer.lru.touch(reversed(keys))

    def default_ttl_s(self, tenant: str) -> float:
        """How long a block of this tenant stays after its last use when its Put does not say; 0: no end."""
        return 0.0

    def pin(self, keys: Sequence[bytes], pin_s: float) -> int:
        """Keeps these and those before them in their chains for `pin_s` from now; 0 unpins. How many are held."""
        raise NotImplementedError

    async def delete(self, selector: Selector) -> tuple[int, int]:
        """Drops the blocks meant, pinned ones too, and what follows them; blocks and slab bytes. They miss at once,
        and are off the disk when this returns. Raises UnavailableError if the disk would not have it."""
        raise NotImplementedError

    def list(self, tenant: str = "", namespace: bytes = b"") -> Iterator[HeldBlock]:
        """The blocks held now, of one tenant, of a namespace (or of a model, by its model_key); "" and b"": all.

        Others may use the store between two of them; what is gone by then is left out.
        """
        raise NotImplementedError

    def verify(self) -> AsyncGenerator[Progress, None]:
        """Proves every block on disk, and drops what fails."""
        raise NotImplementedError

    def compact(self) -> AsyncGenerator[Progress, None]:
        """Writes the LMDB file anew without its free pages. Writing waits, reading goes on.

        Raises UnavailableError without a disk tier or without room for the new file.
        """
        raise NotImplementedError

    def stats(self) -> StoreStats:
        memory, writer = self._memory, self._writer
        return StoreStats(
            memory=TierHoldings(
                num_blocks=len(memory.lru),
                num_bytes=memory.lru.used_bytes,
                capacity_bytes=memory.lru.capacity_bytes,
                hits=self._hits[Tier.MEMORY],
                evictions=memory.num_evictions,
            ),
            disk=TierHoldings()
            if writer is None
            else TierHoldings(
                num_blocks=len(writer.lru),
                num_bytes=writer.lru.used_bytes,
                capacity_bytes=writer.lru.capacity_bytes,
                hits=self._hits[Tier.DISK],
                evictions=writer.num_evictions,
            ),
            misses=self._num_misses,
            corrupt=self._num_corrupt,
            write_failures=0 if writer is None else writer.num_failures,
        )

    def _tier_of(self, key: bytes) -> Tier:
        if key in self._memory or (self._writer is not None and self._writer.pending(key) is not None):
            return Tier.MEMORY
        if self._writer is not None and key in self._writer:
            return Tier.DISK
        return Tier.NONE

    async def _read(self, key: bytes) -> tuple[StoredBlock, Tier] | None:
        block = self._read_memory(key)
        if block is not None:
            return block, Tier.MEMORY
        block = await self._read_disk(key)
        if block is None:
            return None
        self._memory.add(key, block)
        return block, Tier.DISK

    def _read_memory(self, key: bytes) -> StoredBlock | None:
        block = self._memory.get(key)
        if block is None and self._writer is not None:
            block = self._writer.pending(key)
        if block is None:
            return None
        try:
            block.verify()
        except CorruptBlockError as error:
            self._count_corrupt("memory", error)
            self._memory.discard(key)
            return None
        return block

    async def _read_disk(self, key: bytes) -> StoredBlock | None:
        if self._disk is None or self._writer is None or key not in self._writer.lru:
            return None
        try:
            block = await asyncio.get_running_loop().run_in_executor(self._readers, self._disk.read, key)
        except CorruptBlockError as error:
            self._count_corrupt("disk", error)
            block = None
        except DiskFailedError as error:
            logger.warning("kvstore: %s", error)
            return None
        if block is None:
            self._writer.drop(key)
        return block

    def _count_corrupt(self, tier: str, error: CorruptBlockError) -> None:
        self._num_corrupt += 1
        logger.warning("kvstore dropped a block from %s: %s", tier, error)
