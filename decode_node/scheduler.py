"""Which sequences run how many tokens in the next step, and which give way when blocks run out.

Plain data, no clock, no torch; blocks are asked for through `Memory`. The rules, oldest first by arrival:

- Every running sequence advances by at least one token in every step, so an answer never pauses for another's prompt.
- What `max_batched_tokens`, or `step_size`, leaves after that goes to prompts that are computed here, first come,
  first served.
- A sequence that needs a block when there is none takes it from the youngest one that has any: that one is preempted,
  keeps its tokens and its place by age, and comes back once all its KV and a block of headroom fit, in a later pass.

Nobody waits for ever: the oldest that holds blocks is nobody's victim, so it advances in every step, and ends. Each
preemption is paid for by a block that an older sequence then fills, or by one that the victim filled since it came
back, so there are never more of them than blocks written.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from decode_node.step_size import DecodeStepSize
from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.sequence import Sequence
from kvrelay.limits import DecodeLimits


class Restored(Enum):
    NO_ROOM = "no room"
    READY = "ready"
    TO_LOAD = "to load"  # blocks are there; what belongs into them comes from the kvstore first


class Memory(Protocol):
    """Of `decode_node.memory.SequenceMemory`, what scheduling needs."""

    def extend(self, sequence: Sequence, num_tokens: int) -> bool: ...
    def restore(self, sequence: Sequence) -> Restored: ...
    def drop(self, sequence: Sequence) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, empty if nobody can run now, and what had to happen to blocks before it."""

    batch: Batch
    preempted: tuple[Sequence, ...] = ()
    to_load: tuple[Sequence, ...] = ()  # they come back by `loaded`


class Scheduler:
    """Continuous batching: sequences join and leave between steps. `limits` may be replaced between them too."""

    def __init__(self, limits: DecodeLimits, size: DecodeStepSize | None = None) -> None:
        """`size` says what a step takes of what the limits allow; None: all. Raises InvalidRequestError for limits that
        contradict each other."""
        limits.validate()
        self.limits = limits
        self.size = size or DecodeStepSize()
        self._num_arrived = 0
        self._ages: dict[Sequence, int] = {}  # the smaller, the older; of every sequence that is here
        self._waiting: list[Sequence] = []  # by age, as the next one
        self._running: list[Sequence] = []
        self._loading: set[Sequence] = set()

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences of the latest batch that have not been removed, oldest first."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def num_preempted(self) -> int:
        """Sequences that wait for blocks."""
        return sum(not sequence.block_table for sequence in self._waiting)

    @property
    def bounds(self) -> tuple[int, int]:
        """Rows of the next step, and tokens of prompts beside those that run now."""
        return self.size.max_rows(self.limits), self._max_tail_tokens(self._running)

    def stepped(self, num_rows: int, num_tokens: int, step_s: float) -> None:
        """The step just planned took so long."""
        self.size.stepped(self.limits, num_rows, num_tokens, step_s, num_waiting=len(self._waiting))

    @property
    def num_waiting_tokens(self) -> int:
        """Beyond each sequence's next one: of prompts, and of what preempted ones had, to be computed here."""
        return sum(sequence.num_uncomputed - 1 for sequence in self._ages)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """From the next step on it runs, if there is a row for it. It has blocks, and a token to compute."""
        self._ages[sequence] = self._num_arrived
        self._num_arrived += 1
        self._wait(sequence)

    def loaded(self, sequence: Sequence) -> None:
        """What was to be loaded into its blocks is there, as far as it came."""
        self._loading.remove(sequence)
        self._wait(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Whether it was here."""
        if self._ages.pop(sequence, None) is None:
            return False
        self._loading.discard(sequence)
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        return True

    def schedule(self, memory: Memory) -> Plan:
        """The next step."""
        self._rest_beyond_limit()
        preempted: list[Sequence] = []
        scheduled = [s for s in self.running if s.block_table and self._extend(s, memory, preempted)]
        to_load = [] if preempted else self._join(scheduled, memory, preempted)
        return Plan(self._batch([s for s in scheduled if s.block_table], memory), tuple(preempted), tuple(to_load))

    def _rest_beyond_limit(self) -> None:
        """The youngest wait for a row again, with their blocks, when fewer may run than do."""
        while len(self._running) > self.limits.max_batch:
            self._wait(self._running.pop())

    def _extend(self, sequence: Sequence, memory: Memory, preempted: list[Sequence]) -> bool:
        """Gets room for one more token, at the cost of the youngest; False if the sequence has to sit out."""
        while not memory.extend(sequence, 1):
            holders = sorted(self._holders(), key=self._ages.__getitem__)
            if holders == [sequence]:
                return False  # reservations have the rest: it keeps what it has until one of them ends or joins
            victim = holders[-1]
            self._preempt(victim, memory)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _holders(self) -> Iterator[Sequence]:
        yield from self._running
        yield from (sequence for sequence in self._waiting if sequence.block_table)

    def _preempt(self, victim: Sequence, memory: Memory) -> None:
        if victim in self._running:
            self._running.remove(victim)
            self._wait(victim)
        memory.drop(victim)

    def _join(self, scheduled: list[Sequence], memory: Memory, preempted: list[Sequence]) -> list[Sequence]:
        """Lets the oldest waiting ones in; gives those whose blocks must be loaded first.

        One that needs blocks is passed by nobody but those that have theirs: they give them back when they end.
        """
        to_load: list[Sequence] = []
        blocked = False
        for sequence in tuple(self._waiting):
            if len(self._running) >= self.size.max_rows(self.limits) or preempted:
                break
            restored = Restored.READY if sequence.block_table else Restored.NO_ROOM
            if restored is Restored.NO_ROOM and not blocked:
                restored = memory.restore(sequence)
                blocked = restored is Restored.NO_ROOM
            if restored is Restored.NO_ROOM:
                continue
            self._waiting.remove(sequence)
            if restored is Restored.TO_LOAD:
                self._loading.add(sequence)
                to_load.append(sequence)
                continue
            self._insert(self._running, sequence)
            if self._extend(sequence, memory, preempted):
                self._insert(scheduled, sequence)
        return to_load

    def _batch(self, scheduled: list[Sequence], memory: Memory) -> Batch:
        budget = self._max_tail_tokens(scheduled)
        rows = []
        for sequence in scheduled:
            extra = min(sequence.num_uncomputed - 1, budget)
            if extra and not memory.extend(sequence, 1 + extra):
                extra = 0
            budget -= extra
            rows.append(ScheduledRow(sequence, 1 + extra))
        return Batch(tuple(rows))

    def _max_tail_tokens(self, sequences: Collection[Sequence]) -> int:
        """Of prompts in a step of these: those that have all their tokens but the next one wait for the step's end."""
        targets = [one.itl_target_s for one in sequences if one.itl_target_s and one.num_uncomputed == 1]
        return self.size.max_tail_tokens(self.limits, len(sequences), min(targets, default=0.0))

    def _wait(self, sequence: Sequence) -> None:
        self._insert(self._waiting, sequence)

    def _insert(self, queue: list[Sequence], sequence: Sequence) -> None:
        bisect.insort(queue, sequence, key=self._ages.__getitem__)
