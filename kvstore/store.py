"""The tiers together: match, get and put of proven blocks.

A block enters memory at once, and the disk as the write policy has it (kvstore.placement). Read through: a block found
on disk enters memory. What fails its proof is a miss, is counted, and is dropped from its tier. A look-up says nothing
of a block whose time is over, in whichever way it is asked; being served is what makes a block's time begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TypeAlias

from kvrelay.errors import CorruptBlockError
from kvrelay.types import Tier
from kvstore.block import BlockInfo, StoredBlock
from kvstore.clock import Clocks, seconds_since_boot
from kvstore.disk import DiskFailedError, DiskTier
from kvstore.lifetimes import Lifetimes
from kvstore.listing import HeldBlock, Progress
from kvstore.memory import MemoryTier
from kvstore.placement import Placement, WritePolicy
from kvstore.quotas import Quotas
from kvstore.read_ahead import Job, ReadAhead
from kvstore.selector import Selector
from kvstore.stats import StoreStats, TierHoldings
from kvstore.upkeep import Upkeep
from kvstore.writer import DiskWriter

READER_THREADS = 2
TICK_S = 1.0

logger = logging.getLogger(__name__)
Tiers: TypeAlias = "list[Tier]"


class PutOutcome(Enum):
    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"  # empty, corrupt, without its parent, or no tier has room for it


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What a store is told besides its tiers."""

    write_policy: WritePolicy = WritePolicy.THROUGH
    reuse_hits: int = 1  # REUSE: times a block was served before it is written
    min_reuse: float = 0.0  # places in a chain that are used again less often, as a share, do not go to disk
    disk_quotas: Quotas = field(default_factory=Quotas)
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    namespace_ttl_s: float = 0.0  # 0: blocks of models that nobody runs any more stay as long as others
    wall: Callable[[], float] = time.time
    since_boot: Callable[[], float] = seconds_since_boot


class Store:
    """Keys are `namespace_key` + block hash. One owner, the event loop; reads from disk run on threads of its own.

    `now` is the monotonic clock.
    """

    def __init__(
        self,
        memory: MemoryTier,
        disk: DiskTier | None,
        now: Callable[[], float],
        options: StoreOptions | None = None,
    ) -> None:
        self._options = options = options or StoreOptions()
        self._now = now
        self._memory = memory
        self._disk = disk
        self._writer: DiskWriter | None = None
        self._placement: Placement | None = None
        if disk is not None:
            clocks = Clocks(now, options.since_boot, options.wall, disk.boot_id)
            self._writer = DiskWriter(disk, clocks, options.disk_quotas)
            self._placement = Placement(
                memory,
                self._writer,
                options.write_policy,
                reuse_hits=options.reuse_hits,
                min_reuse=options.min_reuse,
            )
        self._readers = ThreadPoolExecutor(READER_THREADS, "kvstore-reader")
        self._upkeep = Upkeep(memory, disk, self._writer, self._readers, now, options.namespace_ttl_s)
        self._ticking: asyncio.Task[None] | None = None
        self._hits = {Tier.MEMORY: 0, Tier.DISK: 0}
        self._num_misses = 0
        self._num_corrupt = 0
        self._num_refused = 0

    async def start(self) -> None:
        if self._writer is not None:
            await self._writer.start()
        self._upkeep.start()
        self._ticking = asyncio.create_task(self._tick_for_ever(), name="kvstore-upkeep")

    async def flush(self, timeout_s: float) -> None:
        """Waits until every accepted block is on disk or was refused by it. Raises TimeoutError."""
        if self._writer is not None:
            await self._writer.flush(timeout_s)

    async def drain(self, timeout_s: float) -> None:
        """Before the end: what is to outlive the process goes to disk. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            if self._placement is not None:
                await self._placement.write_back()
            await self.flush(timeout_s)

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])
        self._readers.shutdown()
        if self._writer is not None:
            await self._writer.close()

    def default_ttl_s(self, tenant: str) -> float:
        """How long a block of this tenant stays after its last use when its Put does not say; 0: no end."""
        return self._options.lifetimes.of(tenant)

    def match(self, keys: Sequence[bytes]) -> Tiers:
        """Where each block is, by the books alone; NONE where it is not. Changes nothing, not even the age."""
        self._upkeep.expire()
        return [self._tier_of(key) for key in keys]

    def match_prefix(self, keys: Sequence[bytes]) -> Tiers:
        """Tiers of the longest prefix that is here; what is asked for beyond it counts as missed."""
        self._upkeep.expire()
        tiers = list(takewhile(lambda tier: tier is not Tier.NONE, map(self._tier_of, keys)))
        self._num_misses += len(keys) - len(tiers)
        return tiers

    async def get(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[StoredBlock, Tier], None]:
        """The blocks in order, each proven now, until the first that is not here or fails its proof.

        A payload may be looked at for as long as its block, or any view of it, is kept, and no longer.
        """
        self._upkeep.expire()
        ahead = ReadAhead(keys, self._size_on_disk, self._begin_read)
        num_served = 0
        try:
            for position, key in enumerate(keys):
                ahead.advance(position)
                found = self._read_memory(key) or await self._read_disk(key, ahead)
                if found is None:
                    self._num_misses += 1
                    return
                ahead.skip(key)
                self._hits[found[1]] += 1
                num_served += 1
                yield found
                del found
        finally:
            ahead.close()
            self._served(keys[:num_served])

    async def put(self, info: BlockInfo, block: StoredBlock) -> PutOutcome:
        """REFUSED where the block before it is not held, except for a first one (chain_index 0)."""
        self._upkeep.expire()
        if block.num_bytes == 0 or not self._proves(block) or not self._has_parent(info):
            self._num_refused += 1
            return PutOutcome.REFUSED
        present = self._tier_of(info.key) is not Tier.NONE
        if present:
            self._served([info.key])
        self._upkeep.namespaces.used(info.key, self._now())
        kept = present or self._memory.add(info, block, self._now())
        if self._placement is not None:
            kept = await self._placement.put(info, block, self._now()) or kept
        if not kept:
            return PutOutcome.REFUSED
        return PutOutcome.PRESENT if present else PutOutcome.STORED

    def pin(self, keys: Sequence[bytes], pin_s: float) -> int:
        """Keeps these and those before them in their chains for `pin_s` from now; 0 unpins. How many are held."""
        return self._upkeep.pin(keys, pin_s)

    async def delete(self, selector: Selector) -> tuple[int, int]:
        """Drops the blocks meant, pinned ones too, and what follows them; blocks and slab bytes. They miss at once,
        and are off the disk when this returns. Raises UnavailableError if the disk would not have it."""
        return await self._upkeep.delete(selector)

    def list(self, tenant: str = "", namespace: bytes = b"") -> Iterator[HeldBlock]:
        """The blocks held now, of one tenant, of a namespace (or of a model, by its model_key); "" and b"": all.

        Others may use the store between two of them; what is gone by then is left out.
        """
        return self._upkeep.list(tenant, namespace)

    def verify(self) -> AsyncGenerator[Progress, None]:
        """Proves every block on disk, and drops what fails."""
        return self._upkeep.verify()

    def compact(self) -> AsyncGenerator[Progress, None]:
        """Writes the LMDB file anew without its free pages. Writing waits, reading goes on.

        Raises UnavailableError without a disk tier or without room for the new file.
        """
        return self._upkeep.compact()

    def stats(self) -> StoreStats:
        return self._upkeep.with_tenants(self.counts(), self._options.disk_quotas)

    def counts(self) -> StoreStats:
        """As `stats`, but of no tenant: reads integers only, so that any thread may ask."""
        memory, writer = self._memory.index, self._writer
        books = None if writer is None else writer.books.index
        return StoreStats(
            memory=TierHoldings(
                num_blocks=len(memory),
                num_bytes=memory.used_bytes,
                capacity_bytes=memory.capacity_bytes,
                hits=self._hits[Tier.MEMORY],
                evictions=memory.num_evictions,
            ),
            disk=TierHoldings()
            if books is None
            else TierHoldings(
                num_blocks=len(books),
                num_bytes=books.used_bytes,
                capacity_bytes=books.capacity_bytes,
                hits=self._hits[Tier.DISK],
                evictions=books.num_evictions,
            ),
            misses=self._num_misses,
            corrupt=self._num_corrupt + self._upkeep.num_corrupt + (0 if writer is None else writer.num_corrupt),
            write_failures=0 if writer is None else writer.num_failures,
            not_worth=0 if self._placement is None else self._placement.num_not_worth,
            refused=self._num_refused + self._memory.num_refused + (0 if writer is None else writer.num_refused),
            expired=self._upkeep.num_expired,
            num_pinned=max(memory.num_pinned, 0 if books is None else books.num_pinned),
            file_bytes=0 if self._disk is None else self._disk.file_bytes(),
            disk_writing=writer is not None and writer.is_writing,
            wipes=0 if self._disk is None else self._disk.num_wipes,
        )

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._upkeep.tick()
            except Exception:
                logger.exception("kvstore: upkeep failed; it is tried again")

    def _tier_of(self, key: bytes) -> Tier:
        if key in self._memory or (self._writer is not None and key in self._writer.pending):
            return Tier.MEMORY
        if self._writer is not None and key in self._writer.books.index:
            return Tier.DISK
        return Tier.NONE

    def _has_parent(self, info: BlockInfo) -> bool:
        return info.chain_index == 0 or self._tier_of(info.parent) is not Tier.NONE

    def _proves(self, block: StoredBlock) -> bool:
        try:
            block.verify()
        except CorruptBlockError as error:
            self._num_corrupt += 1
            logger.warning("kvstore refuses a block that was put: %s", error)
            return False
        return True

    def _served(self, keys: Sequence[bytes]) -> None:
        """A chain's blocks, from its root, were of use."""
        if not keys:
            return
        self._memory.hit(keys, self._now())
        self._upkeep.namespaces.used(keys[0], self._now())
        if self._writer is not None and self._placement is not None:
            self._writer.hit(keys)
            self._placement.served(keys)

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

    async def _read_disk(self, key: bytes, ahead: ReadAhead) -> tuple[StoredBlock, Tier] | None:
        """From a job of the read-ahead, or from one of its own where the block left memory meanwhile."""
        if self._writer is None or not (ahead.reads(key) or self._size_on_disk(key)):
            return None
        found = await ahead.take(key) if ahead.reads(key) else (await self._begin_read([key]))[0]
        if isinstance(found, DiskFailedError):
            logger.warning("kvstore: %s", found)
            return None
        if key not in self._writer.books.index:
            return None  # deleted, or its time was over, while it was read
        if not isinstance(found, StoredBlock):
            self._count_corrupt(Tier.DISK, found or CorruptBlockError("a record is not where it was written"))
            self._upkeep.drop_from_disk([key])
            return None
        self._memory.add(self._writer.books.index.info(key), found, self._now())
        return found, Tier.DISK

    def _size_on_disk(self, key: bytes) -> int:
        """Slab bytes if the block is on disk alone, else 0."""
        return self._writer.books.slab_bytes(key) if self._writer and self._tier_of(key) is Tier.DISK else 0

    def _begin_read(self, keys: Sequence[bytes]) -> Job:
        if self._disk is None:
            raise LookupError("a store without a disk tier reads none")
        return asyncio.get_running_loop().run_in_executor(self._readers, self._disk.read_many, keys)

    def _count_corrupt(self, tier: Tier, error: CorruptBlockError) -> None:
        self._num_corrupt += 1
        logger.warning("kvstore dropped a block from %s: %s", tier.value, error)
