"""Offloading: a node's finished blocks go to the kvstore while its engine works on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from kvrelay.kv.remote import StoreClient
from kvrelay.types import BlockHash

QUERY_BLOCKS = 1_024  # of one question the store is asked

logger = logging.getLogger(__name__)


class Offloader:
    """Sends finished blocks to the store in the background, one batch at a time; drops what it cannot keep up with.

    `read` gives a block's slab, or None if the node no longer has it. `num_dropped` counts blocks that were offered
    and not sent for want of room or because of a failure here; `num_stored` those that were new to the store.
    """

    def __init__(
        self,
        store: StoreClient,
        read: Callable[[BlockHash], Awaitable[bytes | None]],
        *,
        max_pending_blocks: int = 4096,
        batch_blocks: int = 16,
        flush_s: float = 2.0,
    ) -> None:
        self.num_dropped = 0
        self.num_stored = 0
        self._store = store
        self._read = read
        self._max_pending_blocks = max_pending_blocks
        self._batch_blocks = batch_blocks
        self._flush_s = flush_s
        self._pending: dict[BlockHash, None] = {}  # an ordered set
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def offer(self, hashes: Sequence[BlockHash]) -> None:
        """Returns at once; the blocks need not stay where they are."""
        for block_hash in hashes:
            if block_hash in self._pending:
                continue
            if len(self._pending) >= self._max_pending_blocks:
                self.num_dropped += 1
                continue
            self._pending[block_hash] = None
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
            hashes = list(islice(self._pending, QUERY_BLOCKS))
            for block_hash in hashes:
                del self._pending[block_hash]
            try:
                await self._offload(hashes)
            except Exception:  # of `read`: the node's affair; later blocks may fare better
                self.num_dropped += len(hashes)
                logger.exception("cannot offload %d blocks", len(hashes))
            if not self._pending:
                self._work.clear()
                self._idle.set()

    async def _offload(self, hashes: Sequence[BlockHash]) -> None:
        missing = await self._store.missing(hashes)
        for start in range(0, len(missing), self._batch_blocks):
            wanted = missing[start : start + self._batch_blocks]
            # Together: a node reads between two steps of its engine, and one block a step would never keep up.
            slabs = await asyncio.gather(*(self._read(block_hash) for block_hash in wanted))
            batch = [(block_hash, slab) for block_hash, slab in zip(wanted, slabs, strict=True) if slab is not None]
            self.num_stored += await self._store.put(batch)
