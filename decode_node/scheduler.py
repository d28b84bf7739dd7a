"""Which sequences run how many tokens in the next step. Plain data, no clock, no torch."""

from __future__ import annotations

from collections import deque

from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.sequence import Sequence


class Scheduler:
    """Continuous batching: sequences join and leave between steps.

    At most `max_batch` sequences run; more wait in order. Every running one advances by at least one token in every
    step, so an answer never pauses for another request's prompt. What `max_batched_tokens` leaves after that goes
    to prompts whose uncached tail is computed here, first come, first served.
    """

    def __init__(self, max_batch: int, max_batched_tokens: int) -> None:
        """`max_batched_tokens` bounds a step's tokens, and so what a prompt may add to the others' latency."""
        if not 1 <= max_batch <= max_batched_tokens:
            raise ValueError(f"max_batch {max_batch} must be in [1, max_batched_tokens = {max_batched_tokens}]")
        self._max_batch = max_batch
        self._max_batched_tokens = max_batched_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences of the latest batch that have not been removed, oldest first."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """From the next step on it runs, if there is a row for it. It has at least one uncomputed token."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Whether it was here."""
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
                return True
        return False

    def schedule(self) -> Batch:
        """The next step. Not empty if there is work."""
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        budget = self._max_batched_tokens - len(self._running)
        rows = []
        for sequence in self._running:
            extra = min(sequence.num_uncomputed - 1, budget)
            budget -= extra
            rows.append(ScheduledRow(sequence, 1 + extra))
        return Batch(tuple(rows))
