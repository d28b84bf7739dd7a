"""The way of a prompt's first blocks from the store into the blocks set aside for it, while the engine may compute.

The last block that the store has comes first. The engine begins at the front when the load has had its head start, and
the two meet; what the load had brought by then, however it ended, is not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from enum import Enum
from functools import partial

from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CorruptBlockError, KVRelayError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.load_or_compute import LoadOrCompute
from kvrelay.kv.meeting import Meeting
from kvrelay.types import BlockId, Tier
from prefill_node.metrics import PrefillMetrics
from prefill_node.progress import Progress

STALL_S = 0.25  # a store that gives nothing for so long, and for longer than computing takes, is counted as failing

logger = logging.getLogger(__name__)


class LoadOutcome(Enum):
    SKIPPED = "skipped"  # computing was expected to be as quick
    MISSED = "missed"  # the store has none of the blocks, or is left alone
    FAILED = "failed"  # the store did not say what it has
    COMPLETE = "complete"  # all that the store has came
    MET = "met"  # the engine computed the others meanwhile
    SHORT = "short"  # some came, then no more
    STALLED = "stalled"  # none came in time


class PrefixLoader:
    """One node's. Belongs to the event loop, as `costs` does."""

    def __init__(
        self,
        store: BlockStore | None,
        costs: LoadOrCompute,
        write_slab: Callable[[BlockId, Buffer], None],
        metrics: PrefillMetrics,
        *,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s` bounds one load."""
        self.store = store
        self.costs = costs
        self.write_slab = write_slab
        self.metrics = metrics
        self.limit_s = limit_s
        self.clock = clock
        self.num_waiting_tokens = 0  # that the engine is to compute

    def begin(self, sequence: Sequence, progress: Progress) -> PrefixLoad:
        """For an admitted job. Close it before the job's blocks are given away."""
        return PrefixLoad(self, sequence, progress)


class PrefixLoad:
    """One job's. `tiers` are those of the blocks that came, `meeting` is what the engine is given to compute around."""

    def __init__(self, loader: PrefixLoader, sequence: Sequence, progress: Progress) -> None:
        self.tiers: list[Tier] = []
        self.meeting = Meeting(progress.num_cached_blocks, sequence.num_reusable_blocks)
        self._loader = loader
        self._sequence = sequence
        self._progress = progress
        self._first = progress.num_cached_blocks
        self._began_at = self._first_at = loader.clock()
        self._head_start = asyncio.Event()  # is over
        self._task: asyncio.Task[None] | None = None
        if loader.store is not None and not self.meeting.is_met:
            self._plan = loader.costs.choose(sequence.num_reusable_blocks - self._first, loader.num_waiting_tokens)
            self._task = asyncio.create_task(self._run(loader.store))

    async def wait_head_start(self) -> None:
        """Returns when the engine shall begin: nothing more is loaded, or it takes too long."""
        if self._task is None:
            return
        await self._wait_at_most(self._plan.head_start_s)
        if self.meeting.num_loaded * 2 > self.meeting.end - self._first:
            await self._wait_at_most(self._plan.head_start_s)  # well under way: sooner done than a step of the engine

    async def ended(self) -> None:
        """Returns when no more blocks come. Raises what went wrong in here, which is nothing that a store did."""
        if self._task is None:
            return
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def stop(self) -> None:
        """The job has ended, well or not."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Nothing writes into the job's blocks any more when this returns."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _wait_at_most(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._head_start.wait()
        except TimeoutError:
            return

    async def _run(self, store: BlockStore) -> None:
        """Loads until all is here, the engine is met, or the time is over."""
        outcome = LoadOutcome.SKIPPED
        try:
            if self._plan.loads:
                outcome = await self._load_until_met(store)
        finally:
            self._head_start.set()
        took_s = self._loader.clock() - self._began_at
        if self.tiers:
            self._loader.costs.loaded(len(self.tiers), self._first_at - self._began_at, took_s)
        self._loader.metrics.loaded(outcome.value, took_s, len(self.tiers) * self._sequence.block_tokens)

    async def _load_until_met(self, store: BlockStore) -> LoadOutcome:
        loading = asyncio.create_task(self._load(store))
        met = asyncio.create_task(self._progress.wait_until(lambda: self.meeting.is_met))
        try:
            await asyncio.wait({loading, met}, timeout=self._loader.limit_s, return_when=asyncio.FIRST_COMPLETED)
            return loading.result() if loading.done() else self._given_up(store)
        finally:
            loading.cancel()
            met.cancel()
            await asyncio.gather(loading, met, return_exceptions=True)

    def _given_up(self, store: BlockStore) -> LoadOutcome:
        """Of a load that went on when the engine met it, or when its time was over."""
        waited_s = self._loader.clock() - self._began_at
        if self.tiers:
            return LoadOutcome.MET if self.meeting.is_met else LoadOutcome.SHORT
        self._loader.costs.stalled(waited_s)
        if waited_s >= STALL_S:
            store.stalled(self._sequence.chain)
        return LoadOutcome.STALLED

    async def _load(self, store: BlockStore) -> LoadOutcome:
        sequence = self._sequence
        wanted = sequence.block_hashes[self._first : sequence.num_reusable_blocks]
        num_failures = store.num_failures
        held = len(await store.match(wanted, sequence.chain))
        if held == 0:
            return LoadOutcome.MISSED if store.num_failures == num_failures else LoadOutcome.FAILED
        if held < len(wanted):
            self.meeting.shorten(self._first + held)
            plan = self._loader.costs.choose(held, self._loader.num_waiting_tokens)
            if not plan.loads:
                return LoadOutcome.SKIPPED
            if plan.head_start_s == 0.0:
                self._head_start.set()
        try:
            return await self._fill(store, held)
        except KVRelayError as error:
            logger.warning("%d of %d blocks of a prefix were loaded: %s", len(self.tiers), held, error)
            return LoadOutcome.SHORT

    async def _fill(self, store: BlockStore, held: int) -> LoadOutcome:
        """The last block first. Writes only between its own awaits."""
        wanted = self._sequence.block_hashes[self._first : self._first + held][::-1]
        async with aclosing(store.get(wanted, self._sequence.chain)) as slabs:
            async for block_hash, slab, tier in slabs:
                if len(self.tiers) == held or block_hash != wanted[len(self.tiers)]:
                    raise CorruptBlockError("the store sent a block that was not asked for")
                if not self.meeting.load(partial(self._write, slab)):
                    return LoadOutcome.MET
                if not self.tiers:
                    self._first_at = self._loader.clock()
                self.tiers.append(tier)
        if len(self.tiers) == held:
            return LoadOutcome.COMPLETE
        logger.warning("%d of %d blocks of a prefix were loaded, the rest is computed", len(self.tiers), held)
        return LoadOutcome.SHORT

    def _write(self, slab: Buffer, index: int) -> None:
        self._loader.write_slab(self._progress.block_ids[index], slab)
