"""What the engine thread of a prefill node owns: pool, scheduler, runner. A step is schedule, run, update.

A job goes submit -> (admitted) -> start -> (computed) -> end. From admitted on the event loop loads store blocks into
the reserved ones, the last first, until it meets what is computed; until `end` it may read the blocks to send them. So
only `end`, which the event loop asks for once it touches the blocks no more, gives blocks back: also for a job that
failed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvrelay.engine.batch import Batch, Drawn, ScheduledRow
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, KVRelayError, NeverFitsError, OverloadedError
from kvrelay.kv.meeting import Meeting
from kvrelay.kv.pool import BlockPool, PoolCorruptError
from kvrelay.limits import PrefillLimits
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockCounts, BlockHash, BlockId, ReservationId
from prefill_node.scheduler import JobId, PrefillScheduler

LONGER_TWIN = 2  # a prompt waits for the blocks of another that has at most so many times as much to compute


class Runner(Protocol):
    """`kvrelay.engine.runner.ModelRunner`; tests run without a model."""

    def run(self, batch: Batch) -> Seq[Drawn]: ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """The job's blocks are set aside; the first `num_cached_blocks` hold its KV already."""

    job_id: JobId
    block_ids: tuple[BlockId, ...]
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Computed:
    """KV of the first `num_tokens` positions is final; `token` is set when that is the whole prompt."""

    job_id: JobId
    num_tokens: int
    token: GeneratedToken | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The job computes no further; its blocks wait for `end`."""

    job_id: JobId
    error: KVRelayError


JobEvent = Admitted | Computed | Failed


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What a step tells the event loop: news of jobs, and how the node stands after it."""

    events: tuple[JobEvent, ...]
    blocks: BlockCounts
    num_running: int  # jobs that hold blocks
    num_waiting: int
    num_slots_free: int
    limits: PrefillLimits | None = None
    step_tokens: int = 0  # that the next step computes at most
    num_remaining_tokens: int = 0  # to compute, of the jobs that compute
    num_waiting_tokens: int = 0  # the same, and those of jobs that wait or load, as far as they are not cached here
    prompt_tokens: tuple[int, ...] = ()  # each job's part of those, in order of arrival
    num_step_tokens: int = 0  # computed by the step, in step_s
    step_s: float = 0.0


@dataclass(slots=True)
class _Job:
    sequence: Sequence
    meeting: Meeting | None = None  # with blocks that are loaded while it computes; None: none, or it is behind
    admitted: bool = False
    started: bool = False
    failed: bool = False

    @property
    def computes(self) -> bool:
        """Its missing blocks will be here soon, unless it ends before."""
        return self.admitted and not self.failed and self.sequence.num_uncomputed > 0


@dataclass(slots=True)
class PrefillCore:
    """Driven by `kvrelay.engine.loop.EngineLoop`; every method runs on the engine thread."""

    runner: Runner
    pool: BlockPool
    scheduler: PrefillScheduler
    read_slab: Callable[[BlockId], bytes]
    block_tokens: int
    clock: Callable[[], float] = time.monotonic
    _jobs: dict[JobId, _Job] = field(default_factory=dict)
    _events: list[JobEvent] = field(default_factory=list)
    _changed: bool = True  # the event loop's picture of the node is out of date

    # Commands

    def submit(self, job_id: JobId, sequence: Sequence) -> None:
        """Queues a job. Raises NeverFitsError or OverloadedError; nothing changes then."""
        num_blocks = self._blocks_for(sequence)
        if num_blocks > self.pool.num_blocks:
            raise NeverFitsError(
                f"a prompt of {sequence.num_tokens} tokens needs {num_blocks} KV blocks; "
                f"this prefill node has {self.pool.num_blocks} in all"
            )
        self.scheduler.enqueue(job_id)
        self._jobs[job_id] = _Job(sequence)
        self._admit()

    def came(self, asked_at: float) -> None:
        """What follows could not be done before the step that ran since `asked_at` had ended."""
        self.scheduler.waited(max(0.0, self.clock() - asked_at))

    def start(self, job_id: JobId, meeting: Meeting) -> None:
        """Begins to compute an admitted job, whose blocks before `meeting` are filled, and some in it will be."""
        job = self._jobs[job_id]
        sequence = job.sequence
        sequence.block_table = self.pool.commit(_reservation(job_id))
        job.started, job.meeting = True, meeting
        sequence.num_computed_tokens = meeting.first * self.block_tokens
        self._register(sequence)
        self.scheduler.start(job_id, sequence.num_uncomputed)
        self._claim(job_id, job, 0)
        self._events.append(Computed(job_id, sequence.num_computed_tokens, None))
        self._admit()

    def end(self, job_id: JobId) -> None:
        """Gives back all the job has, at whatever stage it is; nothing happens if it was never taken."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self.scheduler.remove(job_id)
        if job.started:
            self.pool.release(job.sequence.block_table)
        elif job.admitted:
            self.pool.cancel(_reservation(job_id))
        self._admit()

    def set_limits(self, limits: PrefillLimits) -> None:
        """In force from the next step on. They are valid."""
        self.scheduler.limits = limits
        self._admit()

    def read(self, block_hash: BlockHash) -> bytes | None:
        """A copy of the block's slab, for the offloader; None when it is not here any more."""
        block_id = self.pool.find(block_hash)
        return None if block_id is None else self.read_slab(block_id)

    def report(self) -> PrefillOutput:
        """News that was not told yet, and how the node stands now."""
        events, self._events = tuple(self._events), []
        self._changed = False
        uncomputed = tuple(job.sequence.num_uncomputed for job in self._jobs.values() if not job.failed)
        return PrefillOutput(
            events=events,
            blocks=self.pool.counts(),
            num_running=sum(job.admitted for job in self._jobs.values()),
            num_waiting=self.scheduler.num_waiting,
            num_slots_free=self.scheduler.num_slots_free,
            limits=self.scheduler.limits,
            step_tokens=self.scheduler.step_tokens,
            num_remaining_tokens=self.scheduler.num_remaining_tokens,
            num_waiting_tokens=sum(uncomputed),
            prompt_tokens=tuple(filter(None, uncomputed)),
        )

    # EngineCore

    def has_work(self) -> bool:
        return self._changed or bool(self._events) or self.scheduler.has_chunks

    def step(self) -> PrefillOutput:
        rows = self._schedule()
        if not rows:
            return self.report()
        batch, started = Batch(tuple(row for _, row in rows)), self.clock()
        self._update(rows, self.runner.run(batch))
        self.scheduler.stepped(batch.num_tokens)
        self._admit()
        return replace(self.report(), num_step_tokens=batch.num_tokens, step_s=self.clock() - started)

    def fail_all(self, error: Exception) -> PrefillOutput:
        """A step raised: every job that computes fails. Loading and waiting ones were not part of it and go on."""
        for job_id, job in self._jobs.items():
            if job.started and job.computes:
                self.scheduler.remove(job_id)
                self._fail(job_id, KVRelayError(f"the engine failed while computing a prompt: {error}"))
        self._admit()
        return self.report()

    def check_idle(self) -> None:
        """Raises PoolCorruptError if the books do not balance, or a block is held while no job is here."""
        self.pool.check()
        counts = self.pool.counts()
        if not self._jobs and counts.held + counts.reserved:
            raise PoolCorruptError(f"no job runs, yet {counts.held} blocks are held and {counts.reserved} reserved")

    # The three calls of a step

    def _schedule(self) -> list[tuple[JobId, ScheduledRow]]:
        rows = []
        for job_id, num_granted in self.scheduler.schedule():
            job = self._jobs[job_id]
            rows.append((job_id, ScheduledRow(job.sequence, self._claim(job_id, job, num_granted))))
        return rows

    def _claim(self, job_id: JobId, job: _Job, num_tokens: int) -> int:
        """How many of the next `num_tokens` the job computes, past those that are loaded; they are its own now."""
        meeting, sequence = job.meeting, job.sequence
        if meeting is None:
            return num_tokens
        start = sequence.num_computed_tokens
        stop = meeting.compute(-(-(start + num_tokens) // self.block_tokens))
        if meeting.num_loaded and meeting.loaded_from * self.block_tokens == start:
            job.meeting = None
            sequence.num_computed_tokens = meeting.end * self.block_tokens
            self.scheduler.advance(job_id, sequence.num_computed_tokens - start)
            self._register(sequence)
            return min(num_tokens, sequence.num_uncomputed)
        return min(num_tokens, stop * self.block_tokens - start)

    def _update(self, rows: list[tuple[JobId, ScheduledRow]], tokens: Seq[Drawn]) -> None:
        for (job_id, row), token in zip(rows, tokens, strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            self.scheduler.advance(job_id, row.num_tokens)
            if isinstance(token, KVRelayError):
                if isinstance(token, BadLogitsError):
                    self.pool.disown(row.sequence.block_table)  # no later prompt shall find the KV that led to this
                self._fail(job_id, token)
            else:
                self._register(row.sequence)
                self._events.append(Computed(job_id, row.sequence.num_computed_tokens, token))

    def _fail(self, job_id: JobId, error: KVRelayError) -> None:
        self._jobs[job_id].failed = True
        self._events.append(Failed(job_id, error))

    def _admit(self) -> None:
        """Admits in order while places and blocks last; called whenever either may have come free.

        Passed are only those for which there is no place yet, by shorter ones for which there is one, and those whose
        next block another job is about to have. One that lacks blocks is passed by nobody.
        """
        self._changed = True
        for job_id in self.scheduler.waiting:
            sequence = self._jobs[job_id].sequence
            prefix = sequence.block_hashes[: sequence.num_reusable_blocks]
            num_cached = len(self.pool.match(prefix))
            sequence.num_computed_tokens = num_cached * self.block_tokens
            num_uncomputed = sequence.num_uncomputed
            if not self.scheduler.may_admit(num_uncomputed) or self._is_computed(prefix, num_cached, num_uncomputed):
                continue
            try:
                reservation = self.pool.reserve(_reservation(job_id), prefix, self._blocks_for(sequence))
            except OverloadedError:
                return
            self.scheduler.admit(job_id)
            self._jobs[job_id].admitted = True
            sequence.num_computed_tokens = reservation.num_cached * self.block_tokens
            self._events.append(Admitted(job_id, tuple(reservation.block_ids), reservation.num_cached))

    def _is_computed(self, prefix: Seq[BlockHash], num_cached: int, num_uncomputed: int) -> bool:
        """Whether another job is about to have the first block that is missing of `prefix`.

        Then it pays to wait for it: the block is computed once. Only a job that is not much longer counts, so that it
        comes about as early as the waiting one itself would; when it ends or fails, nobody waits for it any more.
        """
        if num_cached == len(prefix):
            return False
        return any(
            job.computes
            and job.sequence.num_uncomputed <= LONGER_TWIN * num_uncomputed
            and job.sequence.block_hashes[num_cached : num_cached + 1] == [prefix[num_cached]]
            and job.sequence.num_registered_blocks <= num_cached
            for job in self._jobs.values()
        )

    def _register(self, sequence: Sequence) -> None:
        blocks = sequence.unregistered_blocks()
        for block_id, block_hash in blocks:
            self.pool.register(block_id, block_hash)
        sequence.num_registered_blocks += len(blocks)

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.block_tokens)


def _reservation(job_id: JobId) -> ReservationId:
    return ReservationId(str(job_id))
