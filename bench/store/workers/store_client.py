"""A process that puts chains of blocks into a kvstore and gets them back into a node's pool, as a node does."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import uvloop

from bench.handoff.conversation import Conversation
from bench.handoff.shapes import info_of
from bench.store.put import Putter
from bench.store.rate import rate_of
from bench.store.shapes import fresh_hashes, random_slab
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.remote import StoreClient
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.types import BlockHash, BlockId, Tier

ON_DISK_S = 30.0  # until what was put is there, at most
POLL_S = 0.005
TIERS = {"memory": Tier.MEMORY, "disk": Tier.DISK}

Order = dict[str, Any]


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    client = Client(driver.task)
    driver.tell(ready=True)
    while order := await asyncio.to_thread(driver.next_order):
        driver.tell(bytes_per_s=await client.obey(order))


class Client:
    """Puts one chain after another, of new names each time and the same numbers, and gets the last one."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._num_blocks = task["num_blocks"]
        self._info = info_of(task["shape"])
        self._hashes: list[BlockHash] = []
        self._slabs = [random_slab(self._info.layout.slab_bytes) for _ in range(self._num_blocks)]
        self._pool = PagedKVCache(self._info.layout, self._num_blocks)

    async def obey(self, order: Order) -> float:
        """Bytes a second, to or from the store at `address`."""
        return await (self._put_all if order["do"] == "put" else self._get_back)(order)

    async def _put_all(self, order: Order) -> float:
        """`num_before` chains are put before it counts. With `on_disk` a chain is there when all of it is on disk, and
        not when the store has accepted it."""
        store = self._store(order) if order["on_disk"] else None
        try:
            async with open_channel(order["address"], own_connection=True) as channel:
                putter = Putter(channel, self._info.layout, self._info.fingerprint)
                for _ in range(order.get("num_before", 0)):
                    await self._put(putter, store)
                return await rate_of(lambda: self._put(putter, store), order["seconds"])
        finally:
            if store is not None:
                await store.close()

    async def _get_back(self, order: Order) -> float:
        """Raises AssertionError unless it is what was put last."""
        store = self._store(order)
        try:
            await store.match(self._hashes[:1])  # connects
            rate = await self._get_all(store, TIERS[order["tier"]], order.get("seconds"))
        finally:
            await store.close()
        if any(self._pool.read_slab(BlockId(index)) != slab for index, slab in enumerate(self._slabs)):
            raise AssertionError("other bytes came back than were put")
        return rate

    async def _get_all(self, store: StoreClient, tier: Tier, seconds: float | None) -> float:
        """Over and over for `seconds`, or once."""
        if seconds is not None:
            return await rate_of(lambda: self._get(store, tier), seconds)
        started = time.perf_counter()
        num_bytes = await self._get(store, tier)
        return num_bytes / (time.perf_counter() - started)

    async def _get(self, store: StoreClient, wanted: Tier) -> int:
        num_found = 0
        async with aclosing(store.get(self._hashes)) as blocks:
            async for _, slab, tier in blocks:
                if tier is not wanted:
                    raise AssertionError(f"block {num_found} came from {tier}, not from {wanted}")
                self._pool.write_slab(BlockId(num_found), slab)
                num_found += 1
        if num_found < len(self._hashes):
            raise AssertionError(f"{num_found} of {len(self._hashes)} blocks came")
        return sum(map(len, self._slabs))

    async def _put(self, putter: Putter, store: StoreClient | None) -> int:
        """Bytes put; with a `store`, once it has them on disk."""
        self._hashes = fresh_hashes(self._num_blocks)
        reply = await putter.put(self._hashes, self._slabs)
        if store is not None:
            async with asyncio.timeout(ON_DISK_S):
                await self._until_on_disk(putter, store)
        elif reply.num_stored != self._num_blocks:
            raise AssertionError(f"{reply.num_stored} of {self._num_blocks} blocks were stored")
        return sum(map(len, self._slabs))

    async def _until_on_disk(self, putter: Putter, store: StoreClient) -> None:
        """Puts again what was refused, as the store does with blocks that its disk cannot keep up with."""
        while (tiers := await store.match(self._hashes)) != [Tier.DISK] * self._num_blocks:
            if len(tiers) < self._num_blocks:
                await putter.put(self._hashes, self._slabs[len(tiers) :], start=len(tiers))
            await asyncio.sleep(POLL_S)

    def _store(self, order: Order) -> StoreClient:
        return StoreClient(order["address"], self._info.layout, self._info.fingerprint)


if __name__ == "__main__":
    main()
