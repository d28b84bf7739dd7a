"""A prefill node in virtual time: the node's own engine core (scheduler, pool, waiting for a twin's blocks) on a model
that takes no time; a step takes what the shape says, and KV leaves by a link that one handoff after another uses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.clock import VirtualClock
from bench.sim.request import CountedSequence, SimRequest
from bench.sim.shapes import NodeShape
from kvrelay.cluster import NodeRates, NodeStatus
from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.engine.batch import Batch
from kvrelay.errors import OverloadedError
from kvrelay.kv.meeting import Meeting
from kvrelay.kv.pool import BlockPool
from kvrelay.sampling import GeneratedToken
from kvrelay.types import InstanceId
from prefill_node.engine import Admitted, Computed, Failed, JobEvent, PrefillCore, PrefillOutput
from prefill_node.scheduler import JobId, PrefillScheduler

_TOKEN = GeneratedToken(0)


class _NoModel:
    def run(self, batch: Batch) -> list[GeneratedToken | None]:
        return [_TOKEN if row.yields_token else None for row in batch.rows]


@dataclass(slots=True)
class _Job:
    request: SimRequest
    sequence: CountedSequence
    num_sent: int  # leading tokens that are sent, or need not be


class PrefillNode:
    """`refused` is called with a request that the node has no place for, `handed_over` when a prompt's KV and its first
    token have arrived at the decode node, and `changed` whenever the status may be another."""

    def __init__(
        self,
        clock: VirtualClock,
        shape: NodeShape,
        *,
        handed_over: Callable[[SimRequest], None],
        refused: Callable[[SimRequest, frozenset[InstanceId]], None],
        changed: Callable[[], None],
    ) -> None:
        self.pool = BlockPool(shape.num_prefill_blocks)
        self.num_computed_tokens = 0
        self.busy_s = 0.0
        self._clock = clock
        self._shape = shape
        self._handed_over = handed_over
        self._refused = refused
        self._changed = changed
        self._core = PrefillCore(
            runner=_NoModel(),
            pool=self.pool,
            scheduler=PrefillScheduler(shape.prefill_limits, shape.marks and AdaptiveBound(shape.marks)),
            read_slab=lambda block_id: b"",
            block_tokens=shape.block_tokens,
            clock=lambda: clock.now,
        )
        self._jobs: dict[JobId, _Job] = {}
        self._num_jobs = 0
        self._link_free_at = 0.0
        self._commands: deque[Callable[[], None]] = deque()  # for the engine, between two steps
        self._is_stepping = False
        self._output = self._core.report()

    def status(self) -> NodeStatus:
        output, step = self._output, self._shape.prefill
        budget = self._shape.prefill_limits.max_batched_tokens
        return NodeStatus(
            ready=True,
            blocks=output.blocks,
            num_running=output.num_running,
            num_waiting=output.num_waiting,
            num_slots_free=output.num_slots_free,
            limits=output.limits,
            rates=NodeRates(
                prefill_tokens_per_s=budget / step.of(0, budget), handoff_bytes_per_s=self._shape.link_bytes_per_s
            ),
            num_waiting_tokens=output.num_waiting_tokens,
            step_tokens=output.step_tokens,
            prompt_tokens=output.prompt_tokens,
        )

    def submit(self, request: SimRequest, busy: frozenset[InstanceId]) -> None:
        """Computes its prompt and hands it over, past what the decode node has. `busy` refused it before."""
        asked_at = self._clock.now
        self._command(lambda: self._submit(request, busy, asked_at))

    def _submit(self, request: SimRequest, busy: frozenset[InstanceId], asked_at: float) -> None:
        self._core.came(asked_at)
        job_id, sequence = JobId(self._num_jobs), request.sequence()
        self._num_jobs += 1
        try:
            self._core.submit(job_id, sequence)  # type: ignore[arg-type]
        except OverloadedError:
            self._clock.after(self._shape.call_s, self._refused, request, busy)
            return
        self._jobs[job_id] = _Job(request, sequence, request.num_cached_decode)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if not self._is_stepping:
            self._run()

    def _run(self) -> None:
        """Commands and steps until one takes time, or nothing is left to do."""
        while True:
            while self._commands:
                self._commands.popleft()()
            if not self._core.has_work():
                return
            output = self._core.step()
            if output.num_step_tokens:
                self._is_stepping = True
                step_s = self._shape.prefill.of(0, output.num_step_tokens)
                self.busy_s += step_s
                self._clock.after(step_s, self._end_step, output)
                return
            self._take(output)

    def _end_step(self, output: PrefillOutput) -> None:
        self._is_stepping = False
        self.num_computed_tokens += output.num_step_tokens
        self._take(output)
        self._run()

    def _take(self, output: PrefillOutput) -> None:
        self._output = output
        for event in output.events:
            self._hear(event)
        self._changed()

    def _hear(self, event: JobEvent) -> None:
        job = self._jobs[event.job_id]
        if isinstance(event, Admitted):
            job.request.num_cached_prefill = event.num_cached_blocks * self._shape.block_tokens
            meeting = Meeting(event.num_cached_blocks, event.num_cached_blocks)
            self._core.start(event.job_id, meeting)
        elif isinstance(event, Computed):
            self._send(event, job)
        else:
            assert isinstance(event, Failed)
            raise event.error

    def _send(self, event: Computed, job: _Job) -> None:
        num_tokens = max(0, event.num_tokens - job.num_sent)
        job.num_sent += num_tokens
        seconds = num_tokens * self._shape.token_bytes / self._shape.link_bytes_per_s
        self._link_free_at = max(self._link_free_at, self._clock.now) + seconds
        if event.token is not None:
            self._clock.at(self._link_free_at + self._shape.call_s, self._arrived, event.job_id)

    def _arrived(self, job_id: JobId) -> None:
        job = self._jobs[job_id]
        self._handed_over(job.request)
        self._command(lambda: self._end(job_id))

    def _end(self, job_id: JobId) -> None:
        del self._jobs[job_id]
        self._core.end(job_id)
