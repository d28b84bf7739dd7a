"""A process that asks a kvstore for chains by Zipf's law, and puts what it lacks of them. The same chains are asked of
the store's policy alone."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from contextlib import aclosing

import grpc
import uvloop

from bench.handoff.conversation import Conversation
from bench.store.policy_alone import PolicyAlone
from bench.store.put import Putter
from bench.store.shapes import random_slab
from kvrelay.kv.hashing import hash_fields
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.remote import StoreClient
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import tune_malloc
from kvrelay.types import BlockHash

# Of small blocks there are enough, in a map that is filled in a second, for the hit rate to mean something.
LAYOUT = KVLayout(num_layers=5, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)
FINGERPRINT = "0" * 64
CHAIN_BLOCKS = 8
TIMES_THE_MAP = 4  # bytes of all chains
EXPONENT = 0.9


def main() -> None:
    driver = Conversation()
    tune_malloc()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(driver))


async def _work(driver: Conversation) -> None:
    task = driver.task
    num_chains = TIMES_THE_MAP * task["map_bytes"] // (CHAIN_BLOCKS * LAYOUT.slab_bytes)
    async with open_channel(task["address"], own_connection=True) as channel:
        store = StoreClient(task["address"], LAYOUT, FINGERPRINT)
        try:
            alone = PolicyAlone(task["capacity_bytes"], LAYOUT.slab_bytes)
            churn = Churn(channel, store, alone, num_chains, task["seed"])
            driver.tell(ready=True)
            while order := await asyncio.to_thread(driver.next_order):
                driver.tell(**await churn.run(order["num_bytes"]))
        finally:
            await store.close()


class Churn:
    def __init__(
        self, channel: grpc.aio.Channel, store: StoreClient, alone: PolicyAlone, num_chains: int, seed: int
    ) -> None:
        self._store = store
        self._alone = alone
        self._putter = Putter(channel, LAYOUT, FINGERPRINT)
        self._slab = random_slab(LAYOUT.slab_bytes)
        self._draw = random.Random(seed)
        self._chains = [_chain(number) for number in range(num_chains)]
        weights = [1 / (rank + 1) ** EXPONENT for rank in range(num_chains)]
        self._cumulative = list(itertools.accumulate(weights))

    async def run(self, num_bytes: int) -> dict[str, float]:
        """Until so many bytes were put."""
        num_put = num_asked = num_found = num_found_alone = 0
        started = time.perf_counter()
        while num_put < num_bytes:
            chain = self._draw.choices(self._chains, cum_weights=self._cumulative)[0]
            found = await self._get(chain)
            num_asked += len(chain)
            num_found += found
            num_found_alone += self._alone.ask(chain)
            if found < len(chain):
                await self._putter.put(chain, [self._slab] * (len(chain) - found), start=found)
                num_put += (len(chain) - found) * len(self._slab)
        seconds = time.perf_counter() - started
        return {
            "hit_rate": num_found / num_asked,
            "alone_hit_rate": num_found_alone / num_asked,
            "bytes_per_s": num_put / seconds,
        }

    async def _get(self, chain: Sequence[BlockHash]) -> int:
        num_found = 0
        async with aclosing(self._store.get(chain)) as blocks:
            async for _ in blocks:
                num_found += 1
        return num_found


def _chain(number: int) -> list[BlockHash]:
    return [
        BlockHash(hash_fields(b"churn", number.to_bytes(4, "little"), index.to_bytes(4, "little")))
        for index in range(CHAIN_BLOCKS)
    ]


if __name__ == "__main__":
    main()
