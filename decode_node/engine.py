"""The decode engine: pool, running batch and model. Everything here runs on the engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from decode_node.scheduler import Scheduler
from kvrelay.cluster import ModelInfo
from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, KVRelayError, NotFoundError
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.pool import BlockPool, Reservation
from kvrelay.messages import DecodeFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockCounts, BlockHash, BlockId, CachedTokens, FinishReason, ReservationId


class Runner(Protocol):
    def run(self, batch: Batch) -> Seq[GeneratedToken | BadLogitsError | None]: ...


class Cache(Protocol):
    """Of kvrelay.kv.cache, what a decode node uses."""

    def read_slab(self, block_id: BlockId) -> bytes: ...
    def write_slab(self, block_id: BlockId, payload: Buffer) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How full the engine is: a value that may be read on any thread."""

    blocks: BlockCounts = field(default_factory=BlockCounts)
    num_running: int = 0
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class SequenceAdvanced:
    """What one step did to one sequence. After `finished` or `error` the engine holds nothing of it."""

    reservation_id: ReservationId
    token: GeneratedToken | None = None
    finished: DecodeFinished | None = None
    error: KVRelayError | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    advanced: tuple[SequenceAdvanced, ...]
    filled: tuple[BlockHash, ...] = ()  # blocks that became full and shareable; for the offloader
    num_rows: int = 0
    num_tokens: int = 0  # tokens computed
    step_s: float = 0.0


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._runner = runner
        self._cache = cache
        self._pool = pool
        self._scheduler = scheduler
        self._clock = clock
        self._reserved: set[ReservationId] = set()
        self._sequences: dict[ReservationId, Sequence] = {}
        self._members: dict[Sequence, _Member] = {}
        self.load = EngineLoad(pool.counts())

    def reserve(
        self, reservation_id: ReservationId, prefix_hashes: tuple[BlockHash, ...], num_blocks: int
    ) -> Reservation:
        """As BlockPool.reserve."""
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

    def read_block(self, block_hash: BlockHash) -> bytes | None:
        """A copy of a shareable block's slab, or None if it is here no more."""
        block_id = self._pool.find(block_hash)
        return None if block_id is None else self._cache.read_slab(block_id)

    # EngineCore

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> StepDone:
        started = self._clock()
        batch = self._scheduler.schedule()
        drawn = self._runner.run(batch)
        filled: list[BlockHash] = []
        advanced = [self._update(row, token, filled) for row, token in zip(batch.rows, drawn, strict=True)]
        self._publish()
        return StepDone(
            advanced=tuple(a for a in advanced if a is not None),
            filled=tuple(filled),
            num_rows=len(batch.rows),
            num_tokens=batch.num_tokens,
            step_s=self._clock() - started,
        )

    def fail_all(self, error: Exception) -> StepDone:
        """Ends the sequences of the step that raised; those that waited for a row live on."""
        failed = []
        for sequence in self._scheduler.running:
            reservation_id = self._members[sequence].reservation_id
            failed.append(SequenceAdvanced(reservation_id, error=KVRelayError(f"a decode step failed: {error}")))
            self._let_go(sequence)
        self._publish()
        return StepDone(tuple(failed))

    def check_idle(self) -> None:
        self._pool.check()

    # Within the thread

    def _take_over(self, reservation_id: ReservationId, sequence: Sequence, num_cached_tokens: int | None) -> None:
        if reservation_id not in self._reserved:
            raise NotFoundError(f"reservation {reservation_id} does not exist or has ended")
        self._reserved.remove(reservation_id)
        sequence.block_table = self._pool.commit(reservation_id)
        self._sequences[reservation_id] = sequence
        self._members[sequence] = _Member(reservation_id, self._clock(), num_cached_tokens)

    def _update(
        self, row: ScheduledRow, token: GeneratedToken | BadLogitsError | None, filled: list[BlockHash]
    ) -> SequenceAdvanced | None:
        sequence = row.sequence
        if isinstance(token, BadLogitsError):
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

    def _fail(self, sequence: Sequence, error: BadLogitsError) -> SequenceAdvanced:
        """Ends one sequence of the batch; no later prompt shall find the KV that led to this."""
        reservation_id = self._members[sequence].reservation_id
        self._pool.disown(sequence.block_table)
        self._let_go(sequence)
        return SequenceAdvanced(reservation_id, error=error)

    def _register(self, sequence: Sequence) -> list[BlockHash]:
        """Names the blocks that became full; gives the hashes that were new to the pool."""
        full = sequence.unregistered_blocks()
        sequence.num_registered_blocks += len(full)
        return [block_hash for block_id, block_hash in full if self._pool.register(block_id, block_hash)]

    def _let_go(self, sequence: Sequence) -> None:
        member = self._members.pop(sequence)
        del self._sequences[member.reservation_id]
        self._scheduler.remove(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = []

    def _publish(self) -> None:
        self.load = EngineLoad(self._pool.counts(), self._scheduler.num_running, self._scheduler.num_waiting)
