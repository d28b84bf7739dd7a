"""A decode node in virtual time: the node's own scheduler, block memory and pool; steps take what the shape says.

Steps that would all be alike (the same rows, a token each, no block to take) are taken as one event. What joins
meanwhile waits for the end of the step that it came in, as it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.sim.clock import VirtualClock
from bench.sim.request import CountedSequence, SimRequest
from bench.sim.shapes import NodeShape
from decode_node.memory import SequenceMemory
from decode_node.scheduler import Scheduler
from kvrelay.cluster import NodeRates, NodeStatus
from kvrelay.engine.batch import ScheduledRow
from kvrelay.errors import OverloadedError
from kvrelay.kv.pool import BlockPool
from kvrelay.types import ReservationId

MAX_MODEL_LEN = 1 << 30  # no answer is cut by it


class DecodeNode:
    """`began` is called with a request whose first token is here, `finished` when its last one is drawn, and `changed`
    whenever the status may be another."""

    def __init__(
        self,
        clock: VirtualClock,
        shape: NodeShape,
        *,
        began: Callable[[SimRequest], None],
        finished: Callable[[SimRequest], None],
        changed: Callable[[], None],
    ) -> None:
        self.pool = BlockPool(shape.num_decode_blocks)
        self.num_steps = 0
        self.num_row_steps = 0
        self._clock = clock
        self._shape = shape
        self._began = began
        self._finished = finished
        self._changed = changed
        self._scheduler = Scheduler(shape.decode_limits)
        self._memory = SequenceMemory(self.pool, lambda source, target: None, MAX_MODEL_LEN)
        self._pending: dict[SimRequest, CountedSequence] = {}  # reserved, their KV not here
        self._requests: dict[CountedSequence, SimRequest] = {}
        self._rows: tuple[ScheduledRow, ...] = ()  # of the step under way; none: idle
        self._began_at = self._step_s = 0.0
        self._num_alike = 0  # steps that the event under way stands for
        self._serial = 0  # of that event; older ones are void

    @property
    def num_requests(self) -> int:
        return len(self._pending) + len(self._requests)

    def status(self) -> NodeStatus:
        scheduler, limits = self._scheduler, self._shape.decode_limits
        step = self._shape.decode
        is_open = not scheduler.num_preempted
        return NodeStatus(
            ready=True,
            blocks=self.pool.counts(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_slots_free=max(0, limits.max_requests - self.num_requests) if is_open else 0,
            num_reservations=len(self._pending),
            num_waiting_tokens=sum(max(0, one.num_uncomputed - 1) for one in self._requests),
            step_tokens=scheduler.bounds[1],
            limits=limits,
            rates=NodeRates(
                prefill_tokens_per_s=1 / step.prompt_token_s if self._shape.tells_prompt_rate else 0.0,
                step_s=step.fixed_s,
                step_row_s=step.row_s,
            ),
        )

    def reserve(self, request: SimRequest, num_tokens: int) -> int | None:
        """Sets blocks aside for so many positions; how many of these are cached, or None when there is no room."""
        if self.num_requests >= self._shape.decode_limits.max_requests or self._scheduler.num_preempted:
            return None
        sequence = request.sequence()
        prefix = sequence.block_hashes[: sequence.num_reusable_blocks]
        try:
            reserved = self.pool.reserve(ReservationId(request.request_id), prefix, self._shape.blocks_for(num_tokens))
        except OverloadedError:
            return None
        sequence.num_computed_tokens = reserved.num_cached * self._shape.block_tokens
        sequence.num_registered_blocks = reserved.num_cached
        self._pending[request] = sequence
        self._changed()
        return reserved.num_cached

    def release(self, request: SimRequest) -> None:
        """Gives back what is reserved and not committed."""
        del self._pending[request]
        self.pool.cancel(ReservationId(request.request_id))
        self._changed()
        self._look()

    def commit(self, request: SimRequest) -> None:
        """The prompt's KV is here, and the first token with it."""
        sequence = self._take_over(request)
        sequence.num_computed_tokens = sequence.num_tokens
        self._register(sequence)
        sequence.num_tokens += 1
        self._drew_first(request)
        if request.arrival.num_output == 1:
            self._end(sequence)
        else:
            self._scheduler.add(sequence)
        self._changed()
        self._look()

    def compute(self, request: SimRequest) -> None:
        """What is not cached of the prompt is computed here."""
        self._scheduler.add(self._take_over(request))
        self._changed()
        self._look()

    def _take_over(self, request: SimRequest) -> CountedSequence:
        sequence = self._pending.pop(request)
        sequence.block_table = self.pool.commit(ReservationId(request.request_id))
        self._requests[sequence] = request
        return sequence

    def _look(self) -> None:
        """Something is different: an idle engine looks for work, a busy one does after the step that it is in."""
        if not self._rows:
            self._begin()
            return
        num_steps = max(1, math.ceil((self._clock.now - self._began_at) / self._step_s - 1e-9))
        if num_steps < self._num_alike:
            self._plan_end(num_steps)

    def _begin(self) -> None:
        plan = self._scheduler.schedule(self._memory)
        self._note_preempted(plan.preempted)
        while not plan.batch.rows and plan.preempted:
            plan = self._scheduler.schedule(self._memory)
            self._note_preempted(plan.preempted)
        self._rows = plan.batch.rows
        if not self._rows:
            return
        num_prompt_tokens = sum(row.num_tokens - 1 for row in self._rows)
        self._began_at = self._clock.now
        self._step_s = self._shape.decode.of(len(self._rows), num_prompt_tokens)
        self._plan_end(1 if num_prompt_tokens else self._num_steps_alike())

    def _plan_end(self, num_steps: int) -> None:
        self._num_alike = num_steps
        self._serial += 1
        self._clock.at(self._began_at + num_steps * self._step_s, self._end_steps, self._serial)

    def _num_steps_alike(self) -> int:
        """From now on until a sequence ends, needs a block, or one that waits might join."""
        if self._scheduler.num_waiting:
            return 1
        return min(self._steps_of(row.sequence) for row in self._rows)  # type: ignore[arg-type]

    def _steps_of(self, sequence: CountedSequence) -> int:
        if sequence.num_uncomputed > 1 or not sequence.num_output_tokens:
            return 1
        num_left = self._requests[sequence].arrival.num_output - sequence.num_output_tokens
        num_room = len(sequence.block_table) * self._shape.block_tokens - sequence.num_computed_tokens
        return min(num_left, num_room)

    def _end_steps(self, serial: int) -> None:
        if serial != self._serial:
            return
        self.num_steps += self._num_alike
        self.num_row_steps += self._num_alike * len(self._rows)
        num_registered = 0
        for row in self._rows:
            sequence: CountedSequence = row.sequence  # type: ignore[assignment]
            yields_token = row.yields_token
            sequence.num_computed_tokens += row.num_tokens + self._num_alike - 1
            num_registered += self._register(sequence)
            if yields_token:
                self._drew(sequence, self._num_alike)
        if num_registered or self._scheduler.num_running != len(self._rows):
            self._changed()
        self._rows = ()
        self._begin()

    def _drew(self, sequence: CountedSequence, num_tokens: int) -> None:
        request = self._requests[sequence]
        is_first = not sequence.num_output_tokens
        sequence.num_tokens += num_tokens
        if is_first:
            self._drew_first(request)
        if sequence.num_output_tokens >= request.arrival.num_output:
            self._end(sequence)

    def _drew_first(self, request: SimRequest) -> None:
        request.first_token_at = self._clock.now + self._shape.call_s
        self._began(request)

    def _end(self, sequence: CountedSequence) -> None:
        request = self._requests.pop(sequence)
        self._scheduler.remove(sequence)  # type: ignore[arg-type]
        self._memory.drop(sequence)  # type: ignore[arg-type]
        self._finished(request)

    def _register(self, sequence: CountedSequence) -> int:
        if sequence.num_computed_tokens // sequence.block_tokens == sequence.num_registered_blocks:
            return 0
        blocks = sequence.unregistered_blocks()
        for block_id, block_hash in blocks:
            self.pool.register(block_id, block_hash)
        sequence.num_registered_blocks += len(blocks)
        return len(blocks)

    def _note_preempted(self, preempted: tuple[object, ...]) -> None:
        for sequence in preempted:
            self._requests[sequence].num_preemptions += 1  # type: ignore[index]
        if preempted:
            self._changed()
