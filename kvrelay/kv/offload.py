"""Offloading: a node's finished blocks go to the store in the background, where they stand in nobody's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby, islice
from typing import Protocol

from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.quiet import Quiet
from kvrelay.types import BlockHash

QUERY_BLOCKS = 1_024  # of one question the store is asked
CROWDED = 0.5  # of max_pending_blocks: with so many nothing waits for quiet any more, or blocks would be lost

logger = logging.getLogger(__name__)


class Offer(Protocol):
    """`Offloader.offer`, for those who have blocks."""

    def __call__(self, blocks: Sequence[ChainBlock], *, urgent: bool = False) -> None: ...


def offer_nothing(blocks: Sequence[ChainBlock], *, urgent: bool = False) -> None:
    """Of a node without a store."""


class Offloader:
    """Sends finished blocks to the store, one batch at a time; drops what it cannot keep up with.

    A batch waits until the node has no requests in work, for `patience_s` at most. `read` gives a block's slab, or None
    if the node no longer has it. `num_dropped` counts blocks that were offered and not sent for want of room or because
    of a failure here; `num_stored` those that were new to the store.
    """

    def __init__(
        self,
        store: BlockStore,
        read: Callable[[BlockHash], Awaitable[bytes | None]],
        *,
        quiet: Quiet | None = None,
        max_pending_blocks: int = 4096,
        batch_blocks: int = 16,
        patience_s: float = 0.5,
        flush_s: float = 2.0,
    ) -> None:
        self.num_dropped = 0
        self.num_stored = 0
        self._store = store
        self._read = read
        self._quiet = quiet or Quiet()
        self._max_pending_blocks = max_pending_blocks
        self._batch_blocks = batch_blocks
        self._patience_s = patience_s
        self._flush_s = flush_s
        # In order of the offers. A chain that grows moves once, to another home, with all its blocks.
        self._pending: dict[tuple[BlockHash, BlockHash], ChainBlock] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurries = False  # until nothing is pending
        self._is_crowded = False
        self._task: asyncio.Task[None] | None = None

    def offer(self, blocks: Sequence[ChainBlock], *, urgent: bool = False) -> None:
        """Returns at once; the blocks need not stay where they are. Parents come first.

        With `urgent` ones, which a request will ask for again soon, nothing waits for quiet.
        """
        self._hurries = self._hurries or urgent
        for block in blocks:
            key = (block.chain.home, block.block_hash)
            if key in self._pending:
                continue
            if len(self._pending) >= self._max_pending_blocks:
                self.num_dropped += 1
                continue
            self._pending[key] = block
        if self._pending:
            self._idle.clear()
            self._work.set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="offloader")

    async def flush(self) -> None:
        """Waits until nothing is pending. Bound it: a store that hangs is given up only by its timeouts."""
        await self._idle.wait()

    async def close(self) -> None:
        """Sends what is pending, for at most `flush_s`, then stops."""
        if self._task is None:
            return
        self._hurries = True
        try:
            async with asyncio.timeout(self._flush_s):
                await self.flush()
        except TimeoutError:
            logger.warning("%d or more blocks were not offloaded in time", len(self._pending))
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            keys = list(islice(self._pending, QUERY_BLOCKS))
            self._is_crowded = len(self._pending) >= CROWDED * self._max_pending_blocks
            blocks = [self._pending.pop(key) for key in keys]
            try:
                for chain, group in groupby(blocks, key=lambda block: block.chain):
                    await self._offload(chain, list(group))
            except Exception:  # of `read`: the node's affair; later blocks may fare better
                self.num_dropped += len(blocks)
                logger.exception("cannot offload %d blocks", len(blocks))
            if not self._pending:
                self._hurries = False
                self._work.clear()
                self._idle.set()

    async def _offload(self, chain: Chain, blocks: Sequence[ChainBlock]) -> None:
        await self._wait_for_quiet()
        missing = set(await self._store.missing([block.block_hash for block in blocks], chain))
        wanted = [block for block in blocks if block.block_hash in missing]
        gone: set[BlockHash] = set()
        for start in range(0, len(wanted), self._batch_blocks):
            if start:
                await self._wait_for_quiet()
            await self._send(wanted[start : start + self._batch_blocks], gone)

    async def _send(self, places: Sequence[ChainBlock], gone: set[BlockHash]) -> None:
        """`gone` are blocks of the chain that neither side has; the store would refuse what follows them."""
        # Together: a node reads between two steps of its engine, and one block a step would never keep up.
        slabs = await asyncio.gather(*(self._read(place.block_hash) for place in places))
        batch: list[tuple[BlockHash, bytes]] = []
        sent: list[ChainBlock] = []
        for place, slab in zip(places, slabs, strict=True):
            if slab is None or place.parent in gone:
                gone.add(place.block_hash)
            else:
                batch.append((place.block_hash, slab))
                sent.append(place)
        self.num_stored += await self._store.put(batch, sent)

    async def _wait_for_quiet(self) -> None:
        if not (self._hurries or self._is_crowded):
            await self._quiet.wait(self._patience_s)
