"""The way of a prompt's first blocks from the store into the blocks set aside for it, while the engine may compute.

During its head start a load goes from the front, and what it brings leaves for the decode node at once. When the engine
begins, the rest is loaded from the back, the last block first, until the two meet; what the load had brought by then,
however it ended, is not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from enum import Enum
from functools import partial

from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CorruptBlockError, KVRelayError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.load_or_compute import LoadOrCompute, LoadPlan
from kvrelay.kv.meeting import Meeting
from kvrelay.types import BlockHash, BlockId, Tier
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
        on_loaded: Callable[[int, float], None] = lambda num_blocks, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s` bounds one load; `on_loaded` hears how many blocks came of one, and in how many seconds."""
        self.store = store
        self.costs = costs
        self.write_slab = write_slab
        self.metrics = metrics
        self.limit_s = limit_s
        self.on_loaded = on_loaded
        self.clock = clock
        self.num_waiting_tokens = 0  # that the engine is to compute

    def begin(self, sequence: Sequence, progress: Progress) -> PrefixLoad:
        """For an admitted job. Close it before the job's blocks are given away."""
        return PrefixLoad(self, sequence, progress)


class PrefixLoad:
    """One job's. `tiers` are those of the blocks that came."""

    def __init__(self, loader: PrefixLoader, sequence: Sequence, progress: Progress) -> None:
        self.tiers: list[Tier] = []
        self._loader = loader
        self._sequence = sequence
        self._progress = progress
        self._first, self._end = progress.num_cached_blocks, sequence.num_reusable_blocks  # blocks to ask for
        self._is_known = False  # that the store has all up to _end
        self._plan = LoadPlan(loads=False)
        self._asked_at = self._began_at = self._first_at = loader.clock()
        self._task: asyncio.Task[LoadOutcome | None] | None = None
        progress.found(self._first * sequence.block_tokens)

    async def wait_head_start(self) -> Meeting:
        """Returns when the engine shall begin, and what it computes around: the rest comes meanwhile, if any does."""
        store = self._loader.store
        if store is None or self._first == self._end:
            return Meeting(self._first, self._first)
        self._plan = self._choose()
        outcome: LoadOutcome | None = LoadOutcome.SKIPPED
        if self._plan.loads:
            head_start_s = self._plan.head_start_s
            outcome = await self._load_front(store, head_start_s) if head_start_s > 0 else None
        front = self._first + len(self.tiers)
        if outcome is not None:
            self._end_with(outcome)
            return Meeting(front, front)
        meeting = Meeting(front, self._end)
        self._task = asyncio.create_task(self._load_back(store, meeting))
        return meeting

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

    # From the front

    async def _load_front(self, store: BlockStore, head_start_s: float) -> LoadOutcome | None:
        """None when the head start was over first. Nothing writes any more when this returns."""
        self._task = front = asyncio.create_task(self._fill_front(store))
        try:
            await asyncio.wait([front], timeout=head_start_s)
            if not front.done() and len(self.tiers) * 2 > self._end - self._first:
                await asyncio.wait([front], timeout=head_start_s)  # sooner done than a step of the engine
            if front.cancelled():
                return LoadOutcome.SHORT  # by `stop`
            return front.result() if front.done() else None
        finally:
            front.cancel()
            await asyncio.gather(front, return_exceptions=True)

    async def _fill_front(self, store: BlockStore) -> LoadOutcome | None:
        outcome = await self._ask(store)
        if outcome is not None:
            return outcome
        if self._plan.head_start_s == 0.0:
            return None  # it has less than was hoped for
        block_tokens = self._sequence.block_tokens

        def write(slab: Buffer) -> bool:
            self._write(slab, self._first + len(self.tiers))
            self._progress.found((self._first + len(self.tiers) + 1) * block_tokens)
            return True

        return await self._fill(store, self._sequence.block_hashes[self._first : self._end], write)

    # From the back

    async def _load_back(self, store: BlockStore, meeting: Meeting) -> None:
        """Until all is here, the engine is met, or the time is over."""
        if not self.tiers:
            self._began_at = self._loader.clock()
        filling = asyncio.create_task(self._fill_back(store, meeting))
        met = asyncio.create_task(self._progress.wait_until(lambda: meeting.is_met))
        try:
            left_s = self._loader.limit_s - (self._loader.clock() - self._asked_at)
            await asyncio.wait({filling, met}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            outcome = filling.result() if filling.done() else self._given_up(store, meeting)
        finally:
            filling.cancel()
            met.cancel()
            await asyncio.gather(filling, met, return_exceptions=True)
        self._end_with(outcome)

    async def _fill_back(self, store: BlockStore, meeting: Meeting) -> LoadOutcome:
        if not self._is_known:
            outcome = await self._ask(store)
            meeting.shorten(self._end)
            if outcome is not None:
                return outcome

        def write(slab: Buffer) -> bool:
            return meeting.load(partial(self._write, slab))

        return await self._fill(store, self._sequence.block_hashes[meeting.first : self._end][::-1], write)

    def _given_up(self, store: BlockStore, meeting: Meeting) -> LoadOutcome:
        """Of a load that went on when the engine met it, or when its time was over."""
        if self.tiers:
            return LoadOutcome.MET if meeting.is_met else LoadOutcome.SHORT
        waited_s = self._loader.clock() - self._asked_at
        self._loader.costs.stalled(waited_s)
        if waited_s >= STALL_S:
            store.stalled(self._sequence.chain)
        return LoadOutcome.STALLED

    # Both

    async def _ask(self, store: BlockStore) -> LoadOutcome | None:
        """Learns how much of the prompt the store has; the outcome if that leaves nothing to load."""
        num_failures = store.num_failures
        wanted = self._sequence.block_hashes[self._first : self._sequence.num_reusable_blocks]
        held = len(await store.match(wanted, self._sequence.chain))
        self._end, self._is_known = self._first + held, True
        if held == 0:
            return LoadOutcome.MISSED if store.num_failures == num_failures else LoadOutcome.FAILED
        if held == len(wanted):
            return None
        self._plan = self._choose()
        return None if self._plan.loads else LoadOutcome.SKIPPED

    def _choose(self) -> LoadPlan:
        return self._loader.costs.choose(self._end - self._first, self._loader.num_waiting_tokens)

    async def _fill(self, store: BlockStore, wanted: Seq[BlockHash], write: Callable[[Buffer], bool]) -> LoadOutcome:
        """In the order of `wanted`, until `write` will have no more. Writes only between its own awaits."""
        num_found = 0
        try:
            async with aclosing(store.get(wanted, self._sequence.chain)) as slabs:
                async for block_hash, slab, tier in slabs:
                    if num_found == len(wanted) or block_hash != wanted[num_found]:
                        raise CorruptBlockError("the store sent a block that was not asked for")
                    if not write(slab):
                        return LoadOutcome.MET
                    if not self.tiers:
                        self._first_at = self._loader.clock()
                    self.tiers.append(tier)
                    num_found += 1
        except KVRelayError as error:
            logger.warning("%d of %d blocks of a prefix were loaded: %s", num_found, len(wanted), error)
            return LoadOutcome.SHORT
        if num_found == len(wanted):
            return LoadOutcome.COMPLETE
        logger.warning("%d of %d blocks of a prefix were loaded, the rest is computed", num_found, len(wanted))
        return LoadOutcome.SHORT

    def _write(self, slab: Buffer, index: int) -> None:
        self._loader.write_slab(self._progress.block_ids[index], slab)

    def _end_with(self, outcome: LoadOutcome) -> None:
        now, num_blocks = self._loader.clock(), len(self.tiers)
        if self.tiers:
            self._loader.costs.loaded(num_blocks, self._first_at - self._began_at, now - self._began_at)
            self._loader.on_loaded(num_blocks, now - self._began_at)
        self._loader.metrics.loaded(outcome.value, now - self._asked_at, num_blocks * self._sequence.block_tokens)
