"""Write-behind to disk: which blocks are there, which are on their way, which must go.

Everything here belongs to the event loop; only the LMDB calls run on the writer thread, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvrelay.kv.circuit import Circuit
from kvstore import record
from kvstore.block import StoredBlock
from kvstore.disk import DiskFailedError, DiskFullError, DiskTier
from kvstore.eviction import ByteLRU

MAX_BATCH_BYTES = 16 << 20  # a transaction; larger ones are no faster and hold more memory
MAX_PENDING_BYTES = 64 << 20  # slabs accepted and not yet written
ROOM_WAIT_S = 1.0  # how long a put waits for the queue before it goes without disk
MAX_RECOVERIES = 2  # evictions tried for one batch when the file is full all the same
READER_CHECK_S = 10.0
# With less left on the device, a batch takes the place of older blocks; their pages are free two transactions later.
HEADROOM_BATCHES = 4

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class DiskWriter:
    """`lru` knows the records that are on disk and may be read: a block enters it once its transaction is done.

    `num_failures` counts blocks that were not written: file or device full, I/O errors, queue full for too long.
    """

    def __init__(self, disk: DiskTier, now: Callable[[], float]) -> None:
        self.lru = ByteLRU(disk.capacity_bytes)
        self.num_evictions = 0
        self.num_failures = 0
        self._disk = disk
        self._now = now
        self._circuit = Circuit(threshold=1, first_open_s=5.0, max_open_s=60.0)
        self._thread = ThreadPoolExecutor(1, "kvstore-writer")
        self._task: asyncio.Task[None] | None = None
        self._queue: deque[bytes] = deque()  # keys of _pending, in order, that no transaction has taken up
        self._pending: dict[bytes, StoredBlock] = {}
        self._pending_bytes = 0
        self._doomed: list[bytes] = []  # to be deleted by the next transaction
        self._work = asyncio.Event()
        self._progress = asyncio.Event()  # set after each transaction
        self._readers_checked_at = now()
        self._max_batch_bytes = min(MAX_BATCH_BYTES, disk.capacity_bytes // 16)

    def __contains__(self, key: object) -> bool:
        """On disk or on its way there."""
        return key in self.lru or key in self._pending

    def pending(self, key: bytes) -> StoredBlock | None:
        return self._pending.get(key)

    async def start(self) -> None:
        """Finds the blocks of earlier processes again."""
        for key, num_bytes in await self._run_on_thread(self._disk.scan):
            if self.lru.used_bytes + num_bytes <= self.lru.capacity_bytes:
                self.lru.add(key, num_bytes)
            else:
                self._doom([key])
        self._task = asyncio.create_task(self._run(), name="kvstore-writer")

    async def add(self, key: bytes, block: StoredBlock) -> bool:
        """Takes a block to be written soon; False, counted, if it will not be.

        While the queue is full the caller waits, up to ROOM_WAIT_S: a sender slows down to the disk's speed.
        """
        if not self._accepts(block) or not await self._wait_for_room():
            self.num_failures += 1
            return False
        if key not in self:
            self._pending[key] = block
            self._pending_bytes += block.num_bytes
            self._queue.append(key)
            self._work.set()
        return True

    def drop(self, key: bytes) -> None:
        """Forgets a record that proved bad, and deletes it soon."""
        if key in self.lru:
            self.lru.discard(key)
            self._doom([key])

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was accepted is written or has failed. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self._pending and self._running():
                await self._wait_for_progress()

    async def close(self) -> None:
        """Ends the task and closes the disk tier; what is pending is not written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._run_on_thread(self._disk.close)  # after a transaction that still runs there
        self._thread.shutdown()

    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _accepts(self, block: StoredBlock) -> bool:
        fits = _disk_bytes(block) <= self.lru.capacity_bytes
        return fits and self._running() and self._circuit.allows(self._now())

    async def _wait_for_room(self) -> bool:
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                while self._pending_bytes >= MAX_PENDING_BYTES:
                    await self._wait_for_progress()
        except TimeoutError:
            return False
        return True

    async def _wait_for_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _doom(self, keys: list[bytes]) -> None:
        self._doomed += keys
        self._work.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._queue or (self._doomed and not self._circuit.is_open):
                    await self._write_batch(self._next_batch())
        except Exception:
            logger.exception("kvstore disk tier stops writing for good; blocks on disk stay readable")
        finally:
            self._progress.set()

    def _next_batch(self) -> list[tuple[bytes, StoredBlock]]:
        batch: list[tuple[bytes, StoredBlock]] = []
        num_bytes = 0
        while self._queue:
            block = self._pending[self._queue[0]]
            num_bytes += _disk_bytes(block)
            if batch and num_bytes > self._max_batch_bytes:
                break
            batch.append((self._queue.popleft(), block))
        return batch

    async def _write_batch(self, batch: list[tuple[bytes, StoredBlock]]) -> None:
        try:
            await self._make_place(_sum_bytes(batch))
            await self._write_with_recovery(batch)
        except (DiskFullError, DiskFailedError) as error:
            self.num_failures += len(batch)
            if self._circuit.failed(self._now()):
                logger.warning("kvstore disk tier stops writing for now, reading goes on: %s", error)
        else:
            self._finish(batch)
        for key, block in batch:
            del self._pending[key]
            self._pending_bytes -= block.num_bytes
        self._progress.set()

    async def _make_place(self, num_bytes: int) -> None:
        if not await self._run_on_thread(self._disk.may_grow, HEADROOM_BATCHES * self._max_batch_bytes):
            self._evict(self.lru.pop_oldest(num_bytes))
        self._evict(self.lru.make_room(num_bytes))

    def _finish(self, batch: list[tuple[bytes, StoredBlock]]) -> None:
        if self._circuit.is_open:
            logger.info("kvstore disk tier writes again")
        self._circuit.succeeded()
        for key, block in batch:
            self.lru.add(key, _disk_bytes(block))

    async def _write_with_recovery(self, batch: list[tuple[bytes, StoredBlock]]) -> None:
        """When the file is full in spite of the bound on records, more than the batch's size is evicted first."""
        if self._now() - self._readers_checked_at >= READER_CHECK_S:
            self._readers_checked_at = self._now()
            await self._run_on_thread(self._disk.check_readers)
        for _ in range(MAX_RECOVERIES):
            try:
                await self._commit(batch)
            except DiskFullError:
                self._evict(self.lru.pop_oldest(_sum_bytes(batch) + 1))
                await self._make_room()
            else:
                return
        await self._commit(batch)

    async def _commit(self, batch: list[tuple[bytes, StoredBlock]]) -> None:
        deletes = list(self._doomed)
        await self._run_on_thread(self._disk.write, deletes, batch)
        del self._doomed[: len(deletes)]

    async def _make_room(self) -> None:
        deletes = list(self._doomed)
        await self._run_on_thread(self._disk.make_room, deletes)
        del self._doomed[: len(deletes)]

    def _evict(self, keys: list[bytes]) -> None:
        self.num_evictions += len(keys)
        if keys:
            self._doom(keys)

    async def _run_on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))


def _disk_bytes(block: StoredBlock) -> int:
    """What the record takes of the file."""
    return record.record_pages(block.num_bytes) * record.PAGE_BYTES


def _sum_bytes(batch: list[tuple[bytes, StoredBlock]]) -> int:
    return sum(_disk_bytes(block) for _, block in batch)
