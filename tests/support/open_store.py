"""A store over a directory, for tests of it: opened and closed, filled and asked, every byte compared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvrelay.types import Tier
from kvstore.block import DEFAULT_TENANT
from kvstore.disk import DiskTier
from kvstore.memory import MemoryTier
from kvstore.options import StoreOptions
from kvstore.quotas import Quotas
from kvstore.store import PutOutcome, Store
from tests.support.manual_clock import ManualClock
from tests.support.store_blocks import SLAB_BYTES, block_of, chain_of, info_of, key_of

FLUSH_S = 20.0


@asynccontextmanager
async def opened(
    path: Path | None,
    *,
    memory_blocks: int = 1_000,
    disk_bytes: int = 8 << 20,
    clock: Callable[[], float] | None = None,
    make_disk: type[DiskTier] = DiskTier,
    disposable: bool = False,
    memory_quotas: Quotas | None = None,
    boot_id: str = "boot-1",
    **options: Any,
) -> AsyncIterator[Store]:
    """`options` are fields of StoreOptions."""
    disk = None if path is None else make_disk(path, disk_bytes, boot_id, disposable=disposable)
    memory = MemoryTier(memory_blocks * SLAB_BYTES, memory_quotas)
    store = Store(memory, disk, clock or ManualClock(0.0), StoreOptions(**options))
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def put(store: Store, *numbers: int, flush: bool = True, **info: Any) -> list[PutOutcome]:
    """Blocks that follow nothing."""
    outcomes = [await store.put(info_of(n, **info), block_of(n)) for n in numbers]
    if flush:
        await store.flush(FLUSH_S)
    return outcomes


async def put_chain(
    store: Store, *numbers: int, flush: bool = True, tenant: str = DEFAULT_TENANT, ttl_s: float = 0.0
) -> list[PutOutcome]:
    """Blocks that follow each other, the first from a root."""
    infos = chain_of(*numbers, tenant=tenant, ttl_s=ttl_s)
    outcomes = [await store.put(info, block_of(n)) for info, n in zip(infos, numbers, strict=True)]
    if flush:
        await store.flush(FLUSH_S)
    return outcomes


async def get(store: Store, *numbers: int) -> list[Tier]:
    """Tiers of what was served, after comparing every byte."""
    tiers: list[Tier] = []
    async for block, tier in store.get([key_of(n) for n in numbers]):
        assert block.payload == block_of(numbers[len(tiers)]).payload
        tiers.append(tier)
    return tiers


def where(store: Store, *numbers: int) -> list[Tier]:
    """By a look-up of each on its own."""
    return store.match([key_of(n) for n in numbers])
