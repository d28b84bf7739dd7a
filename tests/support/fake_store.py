"""A store that keeps its books in plain lists and does what an administrator asks, for tests of who asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.errors import UnavailableError
from kvrelay.types import Tier
from kvstore.block import NAMESPACE_BYTES, BlockInfo, StoredBlock
from kvstore.listing import HeldBlock, Progress, TenantHoldings
from kvstore.selector import Selector
from kvstore.service import KVStoreService
from kvstore.stats import StoreStats, TierHoldings
from kvstore.store import PutOutcome
from tests.support.grpc_ends import serving
from tests.support.store_blocks import hash_of


class FakeStore:
    """Blocks come by Put, or by `hold`. Work goes on step by step as `steps` says, as often as `may_work` lets it."""

    def __init__(self) -> None:
        self.held: dict[bytes, HeldBlock] = {}
        self.selected: list[Selector] = []
        self.steps: list[Progress] = [
            Progress(2, 4, num_corrupt=1),
            Progress(4, 4, num_corrupt=1, num_freed_bytes=4096),
        ]
        self.may_work = asyncio.Semaphore(1_000)
        self.num_ended = 0  # of the works that began
        self.without_disk = False

    def hold(self, namespace: bytes, numbers: Sequence[int], root: int = 0, **changes: Any) -> None:
        """A chain of blocks, of which the first follows block `root`."""
        parent = namespace + hash_of(root)
        for index, number in enumerate(numbers):
            info = BlockInfo(namespace + hash_of(number), parent, index, changes.get("tenant", "default"), 60.0)
            block = HeldBlock(info, Tier.MEMORY, 1_000, 10.0, 50.0, 0.0)
            own = {name: value for name, value in changes.items() if name != "tenant"}
            self.held[info.key] = replace(block, **own)
            parent = info.key

    # What the service calls

    def default_ttl_s(self, tenant: str) -> float:
        return 3_600.0 if tenant == "default" else 60.0

    def match(self, keys: Sequence[bytes]) -> list[Tier]:
        return [self.held[key].tier if key in self.held else Tier.NONE for key in keys]

    async def put(self, info: BlockInfo, block: StoredBlock) -> PutOutcome:
        if info.key in self.held:
            return PutOutcome.PRESENT
        if info.chain_index and info.parent not in self.held:
            return PutOutcome.REFUSED
        self.held[info.key] = HeldBlock(info, Tier.MEMORY, block.num_bytes, 0.0, info.ttl_s or None, 0.0)
        return PutOutcome.STORED

    def pin(self, keys: Sequence[bytes], pin_s: float) -> int:
        here = [key for key in keys if key in self.held]
        for key in here:
            self.held[key] = replace(self.held[key], pinned_s=pin_s)
        return len(here)

    async def delete(self, selector: Selector) -> tuple[int, int]:
        self.selected.append(selector)
        meant = [block for key, block in self.held.items() if self._means(selector, key)]
        for block in meant:
            del self.held[block.info.key]
        return len(meant), sum(block.num_bytes for block in meant)

    def list(self, tenant: str = "", namespace: bytes = b"") -> Iterator[HeldBlock]:
        for key, block in list(self.held.items()):
            if tenant in ("", block.info.tenant) and key.startswith(namespace):
                yield block

    async def verify(self) -> AsyncGenerator[Progress, None]:
        try:
            for step in self.steps:
                await self.may_work.acquire()
                yield step
        finally:
            self.num_ended += 1

    async def compact(self) -> AsyncGenerator[Progress, None]:
        if self.without_disk:
            raise UnavailableError("this kvstore has no disk tier")
        async for step in self.verify():
            yield step

    def stats(self) -> StoreStats:
        return StoreStats(
            memory=TierHoldings(len(self.held), 1_000 * len(self.held), 8_000, 5, 1),
            disk=TierHoldings(7, 7_168, 65_536, 3, 2),
            misses=11,
            corrupt=1,
            write_failures=2,
            expired=4,
            num_pinned=sum(block.pinned_s > 0 for block in self.held.values()),
            file_bytes=131_072,
            tenants=(TenantHoldings("acme", 3_000, 4_000, 5_000, 0), TenantHoldings("default", 1_000)),
        )

    def _means(self, selector: Selector, key: bytes) -> bool:
        block = self.held[key]
        return (
            selector.tenant in ("", block.info.tenant)
            and key.startswith(selector.namespace)
            and selector.block_hash in (b"", *(one[NAMESPACE_BYTES:] for one in self._before(key)))
            and (selector.unused_s is None or block.unused_s > selector.unused_s)
        )

    def _before(self, key: bytes) -> Iterator[bytes]:
        """A block and those before it in its chain."""
        while True:
            yield key
            if key not in self.held:
                return
            key = self.held[key].info.parent


@dataclass
class ServedStore:
    store: FakeStore
    service: KVStoreService
    address: str


@asynccontextmanager
async def served_store() -> AsyncIterator[ServedStore]:
    store = FakeStore()
    service = KVStoreService(store)
    async with serving(service.register) as port:
        yield ServedStore(store, service, f"127.0.0.1:{port}")
