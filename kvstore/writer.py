"""Write-behind to disk: which blocks are there, which are on their way, which must go.

Everything here belongs to the event loop; only the LMDB calls run on the writer thread, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from kvrelay.kv.circuit import Circuit
from kvstore.books import DiskBooks
from kvstore.clock import Clocks, StoreClock
from kvstore.disk import Changes, DiskDamagedError, DiskFailedError, DiskFullError, DiskTier
from kvstore.pending import Pending, PendingBlock
from kvstore.quotas import Quotas

MAX_BATCH_BYTES = 16 << 20  # a transaction; larger ones are no faster and hold more memory
MAX_PENDING_BYTES = 64 << 20  # slabs accepted and not yet written
ROOM_WAIT_S = 1.0  # how long a put waits for the queue before it goes without disk
MAX_RECOVERIES = 2  # evictions tried for one batch when the file is full all the same
READER_CHECK_S = 10.0
# With less left on the device, a batch takes the place of older blocks; their pages are free two transactions later.
HEADROOM_BATCHES = 4
ENTRIES_S = 10.0  # how long the news of uses waits for a transaction that blocks come with
MAX_ENTRIES = 1_024  # rewritten by one transaction: each may cost a page

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class DiskWriter:
    """`books` know the records on disk, and those that a transaction is about to write: these are pending, too.

    `num_failures` counts blocks that were not written: file or device full, I/O errors, queue full for too long;
    `num_refused` those for which quotas or pins left no room.
    """

    def __init__(self, disk: DiskTier, clocks: Clocks, quotas: Quotas) -> None:
        self.books = DiskBooks(disk.capacity_bytes, quotas, clocks.monotonic)
        self.pending = Pending()
        self.num_failures = 0
        self.num_refused = 0
        self.num_corrupt = 0  # entries that failed their proof at the start
        self.on_gone: Callable[[Collection[bytes]], None] = _ignore  # told of what leaves the disk by itself
        self._disk = disk
        self._clocks = clocks
        self._clock = StoreClock(clocks, None)
        self._now = clocks.monotonic
        self._circuit = Circuit(threshold=1, first_open_s=5.0, max_open_s=60.0)
        self._thread = ThreadPoolExecutor(1, "kvstore-writer")
        self._task: asyncio.Task[None] | None = None
        self._doomed: list[bytes] = []  # to be deleted by the next transaction
        self._waiting: set[PendingBlock] = set()  # for room among the pending
        self._is_behind = False  # somebody waited for room in vain, and nothing was written since
        self._turn = asyncio.Lock()  # of whoever has the file to himself: a batch, or a compaction
        self._work = asyncio.Event()
        self._progress = asyncio.Event()  # set after each transaction
        self._readers_checked_at = self._entries_written_at = self._now()
        self._max_batch_bytes = min(MAX_BATCH_BYTES, disk.capacity_bytes // 16)

    def __contains__(self, key: object) -> bool:
        """On disk or on its way there."""
        return key in self.books.index or key in self.pending

    @property
    def is_writing(self) -> bool:
        """False while the disk refuses and has not been tried again, and for good once the task has failed."""
        return self._running() and not self._circuit.is_open

    async def start(self) -> None:
        """Finds the blocks of earlier processes again."""
        scan = await self.run_on_thread(self._disk.scan)
        self._clock = StoreClock(self._clocks, scan.mark)
        self.num_corrupt = scan.num_corrupt
        self._doom(self.books.restore(scan, self._clock))
        self._task = asyncio.create_task(self._run(), name="kvstore-writer")

    async def add(self, block: PendingBlock, *, patient: bool = False) -> bool:
        """Takes a block to be written soon; False if it will not be, which is counted unless it was deleted meanwhile.

        While the queue is full the caller waits, up to ROOM_WAIT_S: a sender slows down to the disk's speed. Where one
        has waited in vain, nobody waits any more until something was written: a Put of many blocks would take longer
        than its sender waits for the store. A `patient` caller, who bounds it, waits for as long as it takes.
        """
        if not self._fits(block):
            self.num_refused += 1
            return False
        self._waiting.add(block)
        try:
            if not self._accepts() or not await self._wait_for_room(patient):
                self.num_failures += 1
                return False
            return block in self._waiting and self._push(block)
        finally:
            self._waiting.discard(block)

    def offer(self, block: PendingBlock) -> bool:
        """As `add`, but never waits: what leaves memory cannot."""
        if not self._fits(block):
            self.num_refused += 1
            return False
        if not self._accepts() or not self._has_room():
            self.num_failures += 1
            return False
        return self._push(block)

    def drop(self, keys: Collection[bytes]) -> dict[bytes, int]:
        """Forgets blocks and what follows them, written or pending, and deletes them soon; slab bytes of all.

        `on_gone` is not told: whoever drops knows.
        """
        dropped: dict[bytes, int] = {}
        for key in keys:
            dropped |= self.books.drop(key)
        for key in [*keys, *dropped]:
            dropped |= self.pending.drop(key)
        self._waiting = {block for block in self._waiting if {block.info.key, block.info.parent}.isdisjoint(keys)}
        self._doomed += dropped
        self._work.set()
        return dropped

    def expire(self) -> Collection[bytes]:
        """Drops what has outlived its time."""
        expired = self.books.expire()
        self._doom(expired)
        waited = self.pending.expire(self._now(), self.books.index)
        self.on_gone(waited)
        return [*expired, *waited]

    def hit(self, keys: Collection[bytes]) -> None:
        """A chain's blocks, from its root, were used."""
        self.books.hit(keys)
        self.pending.hit(keys, self._now())

    def pin(self, keys: Collection[bytes], until: float) -> None:
        """Keeps those that are here, and what they follow; until 0 no more."""
        self.books.pin(keys, until)
        self.pending.pin(keys, until)
        for block in self._waiting:
            if block.info.key in keys:
                block.pinned_until = until

    def tick(self) -> None:
        """To be called about once a second: what is due although nobody puts."""
        if self._owes() and not self._circuit.blocks(self._now()):
            self._work.set()

    async def flush(self, timeout_s: float) -> None:
        """Waits until all that was accepted is written or has failed. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.pending and self._running():
                await self._wait_for_progress()

    async def settle(self) -> bool:
        """Waits until what was dropped is off the disk; False if the disk would not have it for now."""
        while self._doomed and self.is_writing:
            await self._wait_for_progress()
        return not self._doomed

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Meanwhile nothing is written; what is accepted waits."""
        async with self._turn:
            yield

    async def close(self) -> None:
        """Ends the task, writes what is known of uses, and closes the disk tier; what is pending is not written."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._write_last_entries()
        await self.run_on_thread(self._disk.close)  # after a transaction that still runs there
        self._thread.shutdown()

    async def run_on_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs it where nothing is written at the same time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))

    def _running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _fits(self, block: PendingBlock) -> bool:
        """Whether room could ever be made; pins may still be in the way when its turn comes."""
        index = self.books.index
        return block.disk_bytes <= min(index.capacity_bytes, index.quotas.of(block.info.tenant) or index.capacity_bytes)

    def _accepts(self) -> bool:
        return self._running() and self._circuit.allows(self._now())

    def _push(self, block: PendingBlock) -> bool:
        if block.info.key not in self:
            self.pending.push(block)
            self._work.set()
        return True

    def _has_room(self) -> bool:
        return self.pending.num_bytes < MAX_PENDING_BYTES

    async def _wait_for_room(self, patient: bool) -> bool:
        if self._is_behind and not patient:
            return self._has_room()
        try:
            async with asyncio.timeout(None if patient else ROOM_WAIT_S):
                while not self._has_room() and self._running():
                    await self._wait_for_progress()
        except TimeoutError:
            self._is_behind = True
        return self._has_room() and self._running()

    async def _wait_for_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    def _doom(self, keys: Collection[bytes]) -> None:
        if keys:
            self._doomed += keys
            self._work.set()
            self.on_gone(keys)

    def _owes(self) -> bool:
        """Whether a transaction is due for the sake of deletes or entries, or to have the file open for reads."""
        return bool(self._doomed) or self._entries_due() or not self._disk.is_open

    def _may_try(self) -> bool:
        return not self._circuit.is_open or self._circuit.allows(self._now())

    def _entries_due(self) -> bool:
        return self.books.num_used > 0 and self._now() - self._entries_written_at >= ENTRIES_S

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self.pending.has_queued() or (self._owes() and self._may_try()):
                    async with self._turn:
                        await self._write_batch(self.pending.take(self._max_batch_bytes))
        except Exception:
            logger.exception("kvstore disk tier stops writing for good; blocks on disk stay readable")
        finally:
            self._progress.set()

    async def _write_batch(self, batch: list[PendingBlock]) -> None:
        fitting: list[PendingBlock] = []
        try:
            fitting = await self._reserve(batch)
            await self._write_with_recovery(fitting)
        except DiskDamagedError as error:
            await self._start_over(error)
        except (DiskFullError, DiskFailedError) as error:
            self._fail(fitting or batch, error)
        else:
            self._succeed()
        lost = [one.info.key for one in batch if self.pending.holds(one) and one.info.key not in self.books.index]
        self.pending.done(batch)
        self.on_gone(lost)
        self._is_behind = False
        self._progress.set()

    async def _reserve(self, batch: list[PendingBlock]) -> list[PendingBlock]:
        """Makes room; those of the batch that may be written."""
        if not await self.run_on_thread(self._disk.may_grow, HEADROOM_BATCHES * self._max_batch_bytes):
            self._doom(self.books.give_way(_sum_bytes(batch)))
        batch = [pending for pending in batch if self.pending.holds(pending)]  # others were deleted just now
        for pending in batch:
            evicted = self.books.reserve(pending)
            if evicted is None:
                self.num_refused += 1
            else:
                self._doom(evicted)
        return [pending for pending in batch if pending.info.key in self.books.index]

    def _fail(self, batch: list[PendingBlock], error: Exception) -> None:
        self.num_failures += len(batch)
        for pending in batch:
            self._doom(self.books.drop(pending.info.key))
        if self._circuit.failed(self._now()):
            logger.warning("kvstore disk tier stops writing for now, reading goes on: %s", error)

    async def _start_over(self, error: DiskDamagedError) -> None:
        """A damaged file would refuse for ever; what it holds can be computed again. The batch goes with it."""
        gone = self.books.clear()
        self.on_gone(gone)
        try:
            await self.run_on_thread(partial(self._disk.reopen, wipe=str(error)))
        except DiskFailedError as failure:
            self._doomed += gone  # where the old file is still there
            self._fail([], failure)
        else:
            self._doomed.clear()

    def _succeed(self) -> None:
        if self._circuit.is_open:
            logger.info("kvstore disk tier writes again")
        self._circuit.succeeded()

    async def _write_with_recovery(self, batch: list[PendingBlock]) -> None:
        """When the file is full in spite of the bound on records, more than the batch's size is evicted first."""
        if self._now() - self._readers_checked_at >= READER_CHECK_S:
            self._readers_checked_at = self._now()
            await self.run_on_thread(self._disk.check_readers)
        for _ in range(MAX_RECOVERIES):
            try:
                await self._commit(batch)
            except DiskFullError:
                self._doom(self.books.give_way(_sum_bytes(batch) + 1))
                await self._make_room()
            else:
                return
        await self._commit(batch)

    async def _commit(self, batch: list[PendingBlock]) -> None:
        deletes = list(self._doomed)
        blocks = [
            (self.books.entry(pending.info.key, self._clock), pending.block)
            for pending in batch
            if pending.info.key in self.books.index
        ]
        entries = self.books.take_used(MAX_ENTRIES, self._clock) if self._entries_due() else []
        await self.run_on_thread(self._disk.write, Changes(deletes, blocks, entries, self._clock.mark()))
        if not self.books.num_used:
            self._entries_written_at = self._now()
        del self._doomed[: len(deletes)]

    async def _make_room(self) -> None:
        deletes = list(self._doomed)
        await self.run_on_thread(self._disk.make_room, deletes)
        del self._doomed[: len(deletes)]

    async def _write_last_entries(self) -> None:
        try:
            while not self._circuit.is_open:
                entries = self.books.take_used(MAX_ENTRIES, self._clock)
                deletes, self._doomed = self._doomed, []
                await self.run_on_thread(self._disk.write, Changes(deletes, (), entries, self._clock.mark()))
                if not self.books.num_used:
                    return
        except (DiskFullError, DiskFailedError) as error:
            logger.warning("kvstore did not write down which blocks were used last: %s", error)


def _sum_bytes(batch: list[PendingBlock]) -> int:
    return sum(pending.disk_bytes for pending in batch)


def _ignore(keys: Collection[bytes]) -> None:
    """Nobody has followers of it elsewhere."""
