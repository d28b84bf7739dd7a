"""What is done to blocks beside putting and serving them: they expire, are pinned, listed, deleted, proven."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from kvrelay.errors import CorruptBlockError, UnavailableError
from kvrelay.types import Tier
from kvstore.block import NAMESPACE_BYTES, BlockInfo
from kvstore.compaction import Compaction
from kvstore.disk import DiskFailedError, DiskFullError, DiskTier
from kvstore.index import TierIndex
from kvstore.listing import HeldBlock, Progress, TenantHoldings
from kvstore.memory import MemoryTier
from kvstore.namespaces import NamespaceAges
from kvstore.quotas import Quotas
from kvstore.selector import Selector
from kvstore.stats import StoreStats
from kvstore.writer import DiskWriter

VERIFY_BLOCKS = 16  # proven by one job on a reader's thread
MAX_TENANTS = 100

logger = logging.getLogger(__name__)
Indexes: TypeAlias = "list[TierIndex]"


class Upkeep:
    """Belongs to the event loop. `num_corrupt` counts what `verify` found."""

    def __init__(
        self,
        memory: MemoryTier,
        disk: DiskTier | None,
        writer: DiskWriter | None,
        readers: ThreadPoolExecutor,
        now: Callable[[], float],
        namespace_ttl_s: float,
    ) -> None:
        self.namespaces = NamespaceAges(namespace_ttl_s)
        self.num_expired = 0
        self.num_corrupt = 0
        self._memory = memory
        self._disk = disk
        self._writer = writer
        self._readers = readers
        self._now = now
        if writer is not None:
            writer.on_gone = self._drop_followers

    def start(self) -> None:
        """Once the books know what earlier processes left."""
        for index in self._indexes():
            for key in index:
                self.namespaces.used(key, index.last_used(key))

    def expire(self) -> None:
        """Drops what has outlived its time: at once where nothing has."""
        expired = set(self._memory.expire(self._now()))
        if self._writer is not None:
            expired.update(self._writer.expire())
        self.num_expired += len(expired)

    def tick(self) -> None:
        """About once a second."""
        self.expire()
        for namespace in self.namespaces.pop_old(self._now()):
            selected = self._selected(Selector(namespace=namespace))
            if any(self._pinned_until(key) > self._now() for key in selected):
                self.namespaces.used(namespace, self._now())  # somebody wants it; its time begins anew
                continue
            keys = self._drop(selected)
            self.num_expired += len(keys)
            if keys:
                logger.info("kvstore dropped %d blocks of a model or layout that nobody uses any more", len(keys))
        if self._writer is not None:
            self._writer.tick()

    def drop_from_disk(self, keys: Sequence[bytes]) -> None:
        """Records that failed their proof; what memory has of them stays."""
        if self._writer is not None:
            self._drop_followers(self._writer.drop(keys))

    def pin(self, keys: Sequence[bytes], pin_s: float) -> int:
        until = self._now() + pin_s if pin_s > 0 else 0.0
        self._memory.index.pin(keys, until)
        if self._writer is not None:
            self._writer.pin(keys, until)
        return sum(self._holds(key) for key in keys)

    async def delete(self, selector: Selector) -> tuple[int, int]:
        self.expire()
        dropped = self._drop(self._selected(selector))
        if self._writer is not None and not await self._writer.settle():
            raise UnavailableError("the disk does not take the deletion now: it will be tried again, as writes are")
        return len(dropped), sum(dropped.values())

    def list(self, tenant: str, namespace: bytes) -> Iterator[HeldBlock]:
        self.expire()
        now = self._now()
        for key in self._all_keys():
            info = self._info(key)
            if info is not None and tenant in ("", info.tenant) and key.startswith(namespace):
                yield self._describe(info, now)

    async def verify(self) -> AsyncGenerator[Progress, None]:
        keys = [] if self._writer is None else list(self._writer.books.index)
        num_corrupt = 0
        yield Progress(0, len(keys))
        for start in range(0, len(keys), VERIFY_BLOCKS):
            batch = keys[start : start + VERIFY_BLOCKS]
            num_corrupt += await self._verify(batch)
            yield Progress(start + len(batch), len(keys), num_corrupt=num_corrupt)

    async def compact(self) -> AsyncGenerator[Progress, None]:
        if self._disk is None or self._writer is None:
            raise UnavailableError("this kvstore has no disk tier (--path)")
        async with self._writer.paused():
            compaction = Compaction(self._disk)
            try:
                await self._writer.run_on_thread(compaction.begin)
                yield compaction.progress()
                while await self._writer.run_on_thread(compaction.step):
                    yield compaction.progress()
                await self._writer.run_on_thread(compaction.finish)
            except (DiskFullError, DiskFailedError) as error:
                raise UnavailableError(f"the store could not be compacted: {error}") from error
            finally:
                await self._writer.run_on_thread(compaction.close)
        yield compaction.progress()

    def with_tenants(self, stats: StoreStats, disk_quotas: Quotas) -> StoreStats:
        memory = self._memory.index
        in_memory = memory.tenants()
        on_disk = {} if self._writer is None else self._writer.books.index.tenants()
        holdings = [
            TenantHoldings(
                tenant,
                in_memory.get(tenant, 0),
                memory.quotas.of(tenant),
                on_disk.get(tenant, 0),
                disk_quotas.of(tenant) if self._writer is not None else 0,
            )
            for tenant in in_memory.keys() | on_disk.keys()
        ]
        holdings.sort(key=lambda held: (-max(held.memory_bytes, held.disk_bytes), held.tenant))
        return dataclasses.replace(stats, tenants=tuple(holdings[:MAX_TENANTS]))

    def _indexes(self) -> Indexes:
        return [self._memory.index] + ([] if self._writer is None else [self._writer.books.index])

    def _all_keys(self) -> set[bytes]:
        keys = set(self._memory.index)
        if self._writer is not None:
            keys.update(self._writer.books.index, self._writer.pending)
        return keys

    def _selected(self, selector: Selector) -> set[bytes]:
        """Keys of the blocks meant."""
        now, found = self._now(), set[bytes]()
        for root in self._roots(selector):
            for index in self._indexes():
                found.update(
                    index.select(
                        tenant=selector.tenant,
                        namespace=selector.namespace,
                        key=root,
                        unused_s=selector.unused_s,
                        now=now,
                    )
                )
        if selector.unused_s is None:
            return found | self._selected_pending(selector)
        return {key for key in found if now - self._last_used(key) > selector.unused_s}

    def _roots(self, selector: Selector) -> Iterable[bytes]:
        """Blocks with the hash meant, in whatever namespace; b"" where none is named."""
        if not selector.block_hash:
            return (b"",)
        return [key for key in self._all_keys() if key[NAMESPACE_BYTES:] == selector.block_hash]

    def _selected_pending(self, selector: Selector) -> set[bytes]:
        """What memory could not keep and the disk has not taken yet."""
        pending = set[bytes]() if self._writer is None else set(self._writer.pending)
        return {
            key
            for key in pending
            if key.startswith(selector.namespace)
            and key.endswith(selector.block_hash)
            and (info := self._info(key)) is not None
            and selector.tenant in ("", info.tenant)
        }

    def _drop(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """The blocks and what follows them, in every tier; their slab bytes."""
        dropped: dict[bytes, int] = {}
        waiting = set(keys)
        while waiting:
            gone: dict[bytes, int] = {}
            for key in waiting:
                gone |= self._memory.discard(key)
            if self._writer is not None:
                gone |= self._writer.drop(waiting)
            waiting = gone.keys() - waiting - dropped.keys()  # what follows these may be in another tier than they
            dropped |= gone
        return dropped

    def _drop_followers(self, keys: Iterable[bytes]) -> None:
        """Blocks left the disk. What follows them in memory is of no use where memory has not kept them itself."""
        for key in keys:
            if key not in self._memory:
                self._memory.discard(key)

    def _holds(self, key: bytes) -> bool:
        return self._info(key) is not None

    def _info(self, key: bytes) -> BlockInfo | None:
        for index in self._indexes():
            if key in index:
                return index.info(key)
        pending = None if self._writer is None else self._writer.pending.get(key)
        return None if pending is None else pending.info

    def _last_used(self, key: bytes) -> float:
        """Now, if it has only just come."""
        return max((index.last_used(key) for index in self._indexes() if key in index), default=self._now())

    def _pinned_until(self, key: bytes) -> float:
        pending = None if self._writer is None else self._writer.pending.get(key)
        until = 0.0 if pending is None else pending.pinned_until
        return max((index.pinned_until(key) for index in self._indexes() if key in index), default=until)

    def _describe(self, info: BlockInfo, now: float) -> HeldBlock:
        resident = self._memory.get(info.key)
        pending = None if self._writer is None else self._writer.pending.get(info.key)
        held = resident or pending
        on_disk = held is None and self._writer is not None
        num_bytes = held.block.num_bytes if held is not None else 0
        if on_disk and self._writer is not None:
            num_bytes = self._writer.books.slab_bytes(info.key)
        unused_s = max(0.0, now - self._last_used(info.key))
        return HeldBlock(
            info,
            Tier.DISK if on_disk else Tier.MEMORY,
            num_bytes,
            unused_s,
            max(0.0, info.ttl_s - unused_s) if info.ttl_s else None,
            max(0.0, self._pinned_until(info.key) - now),
        )

    async def _verify(self, keys: Sequence[bytes]) -> int:
        """Proves some blocks; how many were dropped."""
        if self._disk is None or self._writer is None:
            return 0
        found = await asyncio.get_running_loop().run_in_executor(self._readers, self._disk.read_many, keys)
        corrupt = [
            key
            for key, outcome in zip(keys, found, strict=True)
            if isinstance(outcome, CorruptBlockError) or (outcome is None and self._should_be_on_disk(key))
        ]
        self.num_corrupt += len(corrupt)
        if corrupt:
            logger.warning("kvstore dropped %d blocks from disk that failed their proof", len(corrupt))
        self.drop_from_disk(corrupt)
        return len(corrupt)

    def _should_be_on_disk(self, key: bytes) -> bool:
        """Neither deleted nor still on its way there."""
        return self._writer is not None and key in self._writer.books.index and key not in self._writer.pending
