"""The decode engine: pool, running batch and model. Everything here runs on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from decode_node.memory import SequenceMemory
from decode_node.rates import DecodeRates
from decode_node.resume import Resume, ResumeCosts
from decode_node.scheduler import Plan, Scheduler
from kvrelay.cluster import ModelInfo, NodeRates
from kvrelay.engine.batch import Batch, Drawn, ScheduledRow
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, KVRelayError, NotFoundError, OverloadedError
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.pool import BlockPool, Reservation
from kvrelay.limits import DecodeLimits
from kvrelay.messages import DecodeFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockCounts, BlockHash, BlockId, CachedTokens, FinishReason, ReservationId


class Runner(Protocol):
    def run(self, batch: Batch) -> Seq[Drawn]: ...


class Cache(Protocol):
    """Of kvrelay.kv.cache, what a decode node uses."""

    def read_slab(self, block_id: BlockId) -> bytes: ...
    def copy_block(self, source: BlockId, target: BlockId) -> None: ...
    def write_slab(self, block_id: BlockId, payload: Buffer) -> None: ...
    def write_part(self, block_id: BlockId, payload: Buffer, offset_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full the engine is: a value that may be read on any thread."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0  # of those that wait; while there are any, no reservation is granted
    num_waiting_tokens: int = 0  # that are computed here before sequences can go on by one token a step
    step_tokens: int = 0  # of those, that the next step computes at most
    rates: NodeRates = field(default_factory=NodeRates)


@dataclass(frozen=True, slots=True)
class SequenceAdvanced:
    """What one step did to one sequence. After `finished` or `error` the engine holds nothing of it."""

    reservation_id: ReservationId
    token: GeneratedToken | None = None
    finished: DecodeFinished | None = None
    error: KVRelayError | None = None


@dataclass(frozen=True, slots=True)
class SequencePreempted:
    """It gave its blocks to an older one; `num_tokens` of prompt and answer will have to be held again."""

    reservation_id: ReservationId
    num_tokens: int
    resume: Resume
    to_keep: tuple[ChainBlock, ...] = ()  # to be in the kvstore when it comes back, if it shall load them


@dataclass(frozen=True, slots=True)
class BlocksWanted:
    """A preempted sequence has blocks again; these are to be filled from the kvstore, then comes `loaded`."""

    reservation_id: ReservationId
    chain: Chain
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    advanced: tuple[SequenceAdvanced, ...]
    preempted: tuple[SequencePreempted, ...] = ()
    to_load: tuple[BlocksWanted, ...] = ()
    filled: tuple[ChainBlock, ...] = ()  # blocks that became full and shareable; for the offloader
    num_rows: int = 0
    num_tokens: int = 0  # tokens computed
    step_s: float = 0.0
    bounds: tuple[int, int] | None = None  # rows, and tokens of prompts beside them, that the next may have


@dataclass(slots=True)
class _Member:
    """A sequence whose blocks the engine owns. The clock readings matter only to a prompt computed here."""

    reservation_id: ReservationId
    joined_at: float
    num_cached_tokens: int | None = None  # prompt tokens found here; None after a handoff
    compute_s: float | None = None  # from joining to the first token

    def finished(self, reason: FinishReason) -> DecodeFinished:
        if self.num_cached_tokens is None or self.compute_s is None:
            return DecodeFinished(reason)
        return DecodeFinished(reason, CachedTokens(device=self.num_cached_tokens), self.compute_s)


class DecodeCore:
    """Commands come from `decode_node.node` by the engine loop; `step` is schedule, run, update."""

    def __init__(
        self,
        *,
        info: ModelInfo,
        runner: Runner,
        cache: Cache,
        pool: BlockPool,
        scheduler: Scheduler,
        costs: ResumeCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`costs` decide how preempted sequences come back; None: there is no kvstore to bring them."""
        self._info = info
        self._runner = runner
        self._cache = cache
        self._pool = pool
        self._scheduler = scheduler
        self._memory = SequenceMemory(pool, cache.copy_block, info.max_model_len)
        self._costs = costs or ResumeCosts(info.layout, with_store=False)
        self._rates = DecodeRates(info.layout.slab_bytes)
        self._clock = clock
        self._reserved: set[ReservationId] = set()
        self._sequences: dict[ReservationId, Sequence] = {}
        self._members: dict[Sequence, _Member] = {}
        self._plan = Plan(Batch(()))  # of the step that runs
        self._stalled = False  # nobody can run before a command changes something
        self.load = EngineLoad(pool.counts())

    def reserve(
        self, reservation_id: ReservationId, prefix_hashes: tuple[BlockHash, ...], num_blocks: int
    ) -> Reservation:
        """As BlockPool.reserve; while preempted sequences wait for blocks, theirs is the next room there is."""
        if self._scheduler.num_preempted:
            raise OverloadedError("preempted requests wait for KV blocks here")
        reservation = self._pool.reserve(reservation_id, prefix_hashes, num_blocks)
        self._reserved.add(reservation_id)
        self._publish()
        return reservation

    def commit(self, reservation_id: ReservationId, sequence: Sequence, *, run: bool, finished: bool) -> None:
        """Takes over a sequence whose prompt KV was handed over and proven, with its first token appended.

        Its full blocks become shareable. It runs at once, or when `run` says so, or never if it is `finished`.
        Raises NotFoundError if the reservation is gone.
        """
        self._take_over(reservation_id, sequence, None)
        self._register(sequence)
        if finished:
            self._let_go(sequence)
        elif run:
            self._scheduler.add(sequence)
        self._publish()

    def came(self, asked_at: float) -> None:
        """What follows could not be done before the step that ran since `asked_at` had ended."""
        self._scheduler.size.waited(max(0.0, self._clock() - asked_at))

    def run(self, reservation_id: ReservationId) -> None:
        """Lets a committed sequence join the batch; nothing happens to one that has left."""
        sequence = self._sequences.get(reservation_id)
        if sequence is not None:
            self._scheduler.add(sequence)
            self._publish()

    def compute(self, reservation_id: ReservationId, sequence: Sequence) -> None:
        """Takes over a sequence of which only `num_computed_tokens`, found here, are computed; the rest runs here."""
        num_cached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._take_over(reservation_id, sequence, num_cached)
        self._scheduler.add(sequence)
        self._publish()

    def release(self, reservation_id: ReservationId) -> None:
        """Frees whatever a reservation still has here; nothing if its sequence has ended by itself."""
        sequence = self._sequences.get(reservation_id)
        if sequence is not None:
            self._let_go(sequence)
        elif reservation_id in self._reserved:
            self._reserved.remove(reservation_id)
            self._pool.cancel(reservation_id)
        self._publish()

    def fork(self, parent_id: ReservationId, fork_id: ReservationId, sequence: Sequence, num_blocks: int) -> None:
        """Takes in another answer to the parent's prompt: `sequence` has no output yet, and a seed of its own.

        It joins the batch when `run` says so. It shares the parent's blocks, holds `num_blocks` in all, and recomputes
        the prompt's last token, from whose logits its own first one is drawn. Raises NotFoundError if the parent's
        prompt is not here in full (any more), OverloadedError if there is no room; nothing changes then.
        """
        parent = self._sequences.get(parent_id)
        if parent is None or parent.num_computed_tokens < sequence.num_tokens - 1:
            raise NotFoundError(f"the prompt of reservation {parent_id} is not here to be shared")
        if self._scheduler.num_preempted:
            raise OverloadedError("preempted requests wait for KV blocks here")
        self._memory.share(parent, sequence, num_blocks)
        self._adopt(fork_id, sequence, sequence.num_computed_tokens)
        self._publish()

    def loaded(self, reservation_id: ReservationId, num_blocks: int, seconds: float) -> None:
        """The next `num_blocks` of the blocks that a preempted sequence wanted are filled; it may run again.

        Nothing happens to one that has left.
        """
        sequence = self._sequences.get(reservation_id)
        if sequence is None:
            return
        self._costs.loaded(num_blocks, seconds)
        self._rates.loaded(num_blocks, seconds)
        sequence.num_computed_tokens += num_blocks * sequence.block_tokens
        self._register(sequence)
        self._scheduler.loaded(sequence)
        self._publish()

    def set_limits(self, limits: DecodeLimits) -> None:
        """In force from the next step on. They are valid."""
        self._scheduler.limits = limits
        self._publish()

    def read_block(self, block_hash: BlockHash) -> bytes | None:
        """A copy of a shareable block's slab, or None if it is here no more."""
        block_id = self._pool.find(block_hash)
        return None if block_id is None else self._cache.read_slab(block_id)

    # EngineCore

    def has_work(self) -> bool:
        return self._scheduler.has_work() and not self._stalled

    def step(self) -> StepDone:
        started = self._clock()
        plan = self._plan = self._scheduler.schedule(self._memory)
        batch = plan.batch
        drawn = self._runner.run(batch) if batch.rows else []
        filled: list[ChainBlock] = []
        advanced = [self._update(row, token, filled) for row, token in zip(batch.rows, drawn, strict=True)]
        step_s = self._clock() - started
        self._costs.stepped(len(batch.rows), batch.num_tokens, step_s)
        if batch.rows:
            self._scheduler.stepped(len(batch.rows), batch.num_tokens, step_s)
        self._rates.stepped(len(batch.rows), batch.num_tokens, step_s)
        self._scheduler.size.measured(self._rates.prompt_token_s, self._rates.rows_s(len(batch.rows)))
        self._publish()
        self._stalled = not (batch.rows or plan.preempted)
        preempted, to_load = self._told_of(plan)
        return StepDone(
            advanced=tuple(a for a in advanced if a is not None),
            preempted=preempted,
            to_load=to_load,
            filled=tuple(filled),
            num_rows=len(batch.rows),
            num_tokens=batch.num_tokens,
            step_s=step_s,
            bounds=self._scheduler.bounds,
        )

    def fail_all(self, error: Exception) -> StepDone:
        """Ends the sequences of the step that raised; those that waited for a row or for blocks live on."""
        failed = []
        for sequence in self._scheduler.running:
            reservation_id = self._members[sequence].reservation_id
            failed.append(SequenceAdvanced(reservation_id, error=KVRelayError(f"a decode step failed: {error}")))
            self._let_go(sequence)
        preempted, to_load = self._told_of(self._plan)
        self._publish()
        return StepDone(tuple(failed), preempted=preempted, to_load=to_load)

    def check_idle(self) -> None:
        self._pool.check()

    # Within the thread

    def _take_over(self, reservation_id: ReservationId, sequence: Sequence, num_cached_tokens: int | None) -> None:
        if reservation_id not in self._reserved:
            raise NotFoundError(f"reservation {reservation_id} does not exist or has ended")
        self._reserved.remove(reservation_id)
        sequence.block_table = self._pool.commit(reservation_id)
        self._adopt(reservation_id, sequence, num_cached_tokens)

    def _adopt(self, reservation_id: ReservationId, sequence: Sequence, num_cached_tokens: int | None) -> None:
        self._sequences[reservation_id] = sequence
        self._members[sequence] = _Member(reservation_id, self._clock(), num_cached_tokens)

    def _update(self, row: ScheduledRow, token: Drawn, filled: list[ChainBlock]) -> SequenceAdvanced | None:
        sequence = row.sequence
        if isinstance(token, KVRelayError):
            return self._fail(sequence, token)
        sequence.num_computed_tokens += row.num_tokens
        filled.extend(self._register(sequence))
        if token is None:
            return None
        member = self._members[sequence]
        if member.compute_s is None:
            member.compute_s = self._clock() - member.joined_at
        sequence.append(token.token_id)
        reason = sequence.finish_reason(self._info.eos_token_ids, self._info.max_model_len)
        if reason is None:
            return SequenceAdvanced(member.reservation_id, token)
        self._let_go(sequence)
        return SequenceAdvanced(member.reservation_id, token, member.finished(reason))

    def _fail(self, sequence: Sequence, error: KVRelayError) -> SequenceAdvanced:
        """Ends one sequence of the batch; no later prompt shall find KV that led to bad logits."""
        reservation_id = self._members[sequence].reservation_id
        if isinstance(error, BadLogitsError):
            self._pool.disown(sequence.block_table)
        self._let_go(sequence)
        return SequenceAdvanced(reservation_id, error=error)

    def _register(self, sequence: Sequence) -> list[ChainBlock]:
        """Names the blocks that became full; gives those that were new to the pool."""
        first, full = sequence.num_registered_blocks, sequence.unregistered_blocks()
        sequence.num_registered_blocks += len(full)
        new = [index for index, block in enumerate(full, first) if self._pool.register(*block)]
        return sequence.blocks_to_keep(new)

    def _let_go(self, sequence: Sequence) -> None:
        member = self._members.pop(sequence)
        del self._sequences[member.reservation_id]
        self._scheduler.remove(sequence)
        self._memory.drop(sequence)

    def _told_of(self, plan: Plan) -> tuple[tuple[SequencePreempted, ...], tuple[BlocksWanted, ...]]:
        """What happened to blocks before the step, once: it holds whether or not the step itself came about."""
        self._plan = Plan(Batch(()))
        return (
            tuple(self._preempted(sequence) for sequence in plan.preempted),
            tuple(self._wanted(sequence) for sequence in plan.to_load),
        )

    def _preempted(self, sequence: Sequence) -> SequencePreempted:
        resume = self._costs.choose()
        to_keep: tuple[ChainBlock, ...] = ()
        if resume is Resume.SWAP:
            self._memory.load_on_return(sequence)
            to_keep = tuple(sequence.blocks_to_keep(range(sequence.num_reusable_blocks)))
        return SequencePreempted(self._members[sequence].reservation_id, sequence.num_tokens, resume, to_keep)

    def _wanted(self, sequence: Sequence) -> BlocksWanted:
        missing = slice(sequence.num_registered_blocks, sequence.num_reusable_blocks)
        return BlocksWanted(
            self._members[sequence].reservation_id,
            sequence.chain,
            tuple(sequence.block_hashes[missing]),
            tuple(sequence.block_table[missing]),
        )

    def _publish(self) -> None:
        self._stalled = False
        scheduler = self._scheduler
        self.load = EngineLoad(
            self._pool.counts(),
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_preempted,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            step_tokens=scheduler.bounds[1],
            rates=self._rates.rates(),
        )
