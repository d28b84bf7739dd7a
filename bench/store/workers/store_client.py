"""A process that puts chains of blocks into a kvstore and gets them back into a node's pool, as a node does."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import grpc
import uvloop

from bench.handoff.conversation import Conversation
from bench.handoff.shapes import info_of
from bench.store.put import Putter
from bench.store.rate import rate_of
from bench.store.shapes import fresh_hashes, random_slab
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.remote import StoreClient
from kvrelay.pb import kvstore_pb2, kvstore_pb2_grpc
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.types import BlockHash, BlockId, Tier

ON_DISK_S = 30.0  # until what was put is there, at most
POLL_S = 0.001
TIERS = {"memory": Tier.MEMORY, "disk": Tier.DISK}

Order = dict[str, Any]


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    task = driver.task
    async with open_channel(task["address"], own_connection=True) as channel:
        client = Client(channel, task)
        driver.tell(ready=True)
        while order := await asyncio.to_thread(driver.next_order):
            driver.tell(bytes_per_s=await client.obey(order))


class Client:
    """Puts one chain after another, of new names each time and the same numbers, and gets the last one."""

    def __init__(self, channel: grpc.aio.Channel, task: dict[str, Any]) -> None:
        self._address = task["address"]
        self._num_blocks = task["num_blocks"]
        self._info = info_of(task["shape"])
        self._hashes: list[BlockHash] = []
        self._slabs = [random_slab(self._info.layout.slab_bytes) for _ in range(self._num_blocks)]
        self._pool = PagedKVCache(self._info.layout, self._num_blocks)
        self._putter = Putter(channel, self._info)
        self._stub = kvstore_pb2_grpc.KVStoreStub(channel)

    async def obey(self, order: Order) -> float:
        """Bytes a second."""
        if order["do"] == "put":
            return await rate_of(lambda: self._put(on_disk=order["on_disk"]), order["seconds"])
        store = StoreClient(self._address, self._info.layout, self._info.fingerprint)
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
        return num_found * self._info.layout.slab_bytes

    async def _put(self, *, on_disk: bool) -> int:
        """Bytes put. `on_disk`: returns when all of it is, and not when the store has accepted it."""
        hashes = fresh_hashes(self._num_blocks)
        num_before = await self._num_on_disk() if on_disk else 0
        reply = await self._putter.put(hashes, self._slabs)
        if reply.num_stored != self._num_blocks:
            raise AssertionError(f"{reply.num_stored} of {self._num_blocks} blocks were stored")
        self._hashes = hashes
        if on_disk:
            async with asyncio.timeout(ON_DISK_S):
                while await self._num_on_disk() < num_before + self._num_blocks:
                    await asyncio.sleep(POLL_S)
        return self._num_blocks * self._info.layout.slab_bytes

    async def _num_on_disk(self) -> int:
        reply = await self._stub.Stats(kvstore_pb2.StatsRequest())
        return int(reply.disk.num_blocks)


if __name__ == "__main__":
    main()
