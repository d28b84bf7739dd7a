"""The tiers together: match, get and put of proven blocks.

A block enters memory at once, and the disk as the write policy has it (kvstore.placement). Read through: a block found
on disk enters memory. What fails its proof is a miss, is counted, and is dropped from its tier. A look-up says nothing
of a block whose time is over, in whichever way it is asked; being served is what makes a block's time begin anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from enum import Enum
from itertools import takewhile
from typing import TypeAlias

from kvrelay.errors import CorruptBlockError
from kvrelay.types import Tier
from kvstore.block import BlockInfo, StoredBlock
from kvstore.clock import Clocks
from kvstore.disk import DiskTier
from kvstore.listing import HeldBlock, Progress
from kvstore.memory import MemoryTier
from kvstore.options import StoreOptions
from kvstore.placement import Placement
from kvstore.reader import Reader
from kvstore.selector import Selector
from kvstore.stats import StoreStats, TierHoldings
from kvstore.upkeep import Upkeep
from kvstore.writer import DiskWriter

TICK_S = 1.0

logger = logging.getLogger(__name__)
Tiers: TypeAlias = "list[Tier]"


class PutOutcome(Enum):
    STORED = "stored"
    PRESENT = "present"
    REFUSED = "refused"  # empty, corrupt, without its parent, or no tier has room for it


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
        self._reader = Reader(memory, disk, self._writer, now)
        self._upkeep = Upkeep(memory, disk, self._writer, self._reader.threads, now, options.namespace_ttl_s)
        self._ticking: asyncio.Task[None] | None = None
        self._num_missed_by_match = 0
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
        self._reader.threads.shutdown()
        if self._writer is not None:
            await self._writer.close()

    def default_ttl_s(self, tenant: str) -> float:
        """How long a block of this tenant stays after its last use when its Put does not say; 0: no end."""
        return self._options.lifetimes.of(tenant)

    def match(self, keys: Sequence[bytes]) -> Tiers:
        """Where each block is, by the books alone; NONE where it is not. Changes nothing, not even the age."""
        self._upkeep.expire()
        return [self._reader.tier_of(key) for key in keys]

    def match_prefix(self, keys: Sequence[bytes]) -> Tiers:
        """Tiers of the longest prefix that is here; what is asked for beyond it counts as missed."""
        self._upkeep.expire()
        tiers = list(takewhile(lambda tier: tier is not Tier.NONE, map(self._reader.tier_of, keys)))
        self._num_missed_by_match += len(keys) - len(tiers)
        return tiers

    async def get(self, keys: Sequence[bytes]) -> AsyncGenerator[tuple[StoredBlock, Tier], None]:
        """The blocks in order, each proven now, until the first that is not here or fails its proof.

        A payload may be looked at for as long as its block, or any view of it, is kept, and no longer.
        """
        self._upkeep.expire()
        num_served = 0
        try:
            async with aclosing(self._reader.read(keys, self._upkeep)) as reading:
                async for found in reading:
                    num_served += 1
                    yield found
                    del found
        finally:
            self._served(keys[:num_served])

    async def put(self, info: BlockInfo, block: StoredBlock) -> PutOutcome:
        """REFUSED also where the block before it is not held (a first one, chain_index 0, needs none), or where those
        beside it in the chain say that its place is another."""
        self._upkeep.expire()
        if block.num_bytes == 0 or not self._proves(block) or not self._fits_chain(info):
            self._num_refused += 1
            return PutOutcome.REFUSED
        present = self._reader.tier_of(info.key) is not Tier.NONE
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
                hits=self._reader.hits[Tier.MEMORY],
                evictions=memory.num_evictions,
            ),
            disk=TierHoldings()
            if books is None
            else TierHoldings(
                num_blocks=len(books),
                num_bytes=books.used_bytes,
                capacity_bytes=books.capacity_bytes,
                hits=self._reader.hits[Tier.DISK],
                evictions=books.num_evictions,
            ),
            misses=self._num_missed_by_match + self._reader.num_misses,
            corrupt=self._num_corrupt
            + self._reader.num_corrupt
            + self._upkeep.num_corrupt
            + (0 if writer is None else writer.num_corrupt),
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

    def _fits_chain(self, info: BlockInfo) -> bool:
        """Whether what it follows is held, and the places of those beside it go on by one."""
        if info.chain_index > 0 and self._reader.tier_of(info.parent) is Tier.NONE:
            return False
        on_disk = self._writer is None or self._writer.books.index.accepts(info)
        return on_disk and self._memory.index.accepts(info)

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
