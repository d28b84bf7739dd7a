"""Who waits for KV memory and who may try to get some now. Pure.

First come, first served, with one rule against starvation: once the head of the queue was refused, nobody passes it.
Without a refusal several try at once, so a slow node does not hold up the others' requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import OverloadedError

MAX_TRYING = 8  # Reserve calls in flight at once
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0
_SMOOTHING = 0.1  # weight of the newest wait in the running mean


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue. `may_try` is called when it is this one's turn to ask for a reservation."""

    may_try: Callable[[], None]
    entered_at: float
    trying: bool = False
    refused_at: int | None = None  # the change count when its last, refused, try began
    tried_at: int = 0


class Admission:
    """`max_queue` bounds new requests; ones that lost their decode node come back to the front, unbounded.

    A request for several answers has a place kept for each that does not wait yet; it counts as one taken.
    """

    def __init__(self, max_queue: int, *, max_trying: int = MAX_TRYING) -> None:
        self._max_queue = max_queue
        self._max_trying = max_trying
        self._queue: list[Ticket] = []
        self._num_kept = 0
        self._num_changes = 0
        self._mean_wait_s = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def retry_after_s(self) -> float:
        """Advice to those turned away: what recent requests waited, within bounds."""
        return min(max(self._mean_wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def check_room(self, num_places: int = 1) -> None:
        """Raises OverloadedError when the queue has no room for so many more."""
        num_taken = len(self._queue) + self._num_kept
        if num_taken + num_places > self._max_queue:
            raise OverloadedError(
                f"{num_taken} answers wait already, and {num_places} more would be over the {self._max_queue} that "
                "this coordinator queues; try again later",
                retry_after_s=self.retry_after_s,
            )

    def keep(self, num_places: int) -> None:
        """Sets places aside for answers that enter later, at the front; `check_room` says beforehand if they are to be
        had."""
        self._num_kept += num_places

    def give_back(self, num_places: int) -> None:
        """As many kept places are needed no more: their answers enter now, or never."""
        self._num_kept -= num_places

    def enter(self, may_try: Callable[[], None], now: float, *, front: bool = False, refused: bool = False) -> Ticket:
        """Queues at the end (OverloadedError when full) or, for a request that was admitted before, at the front.

        `refused`: it was just refused, so it waits for a change first.
        """
        ticket = Ticket(may_try, now, refused_at=self._num_changes if refused else None)
        if front:
            self._queue.insert(0, ticket)
        else:
            self.check_room()
            self._queue.append(ticket)
        self._call_next()
        return ticket

    def refused(self, ticket: Ticket) -> None:
        """No node had room; the ticket keeps its place and tries again after a change."""
        ticket.trying, ticket.refused_at = False, ticket.tried_at
        self._call_next()

    def admitted(self, ticket: Ticket, now: float) -> None:
        """The ticket got its room and leaves."""
        self._mean_wait_s += _SMOOTHING * (now - ticket.entered_at - self._mean_wait_s)
        self.leave(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Gave up, was cancelled or failed; leaving twice is harmless."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            self._call_next()

    def changed(self) -> None:
        """Room may have appeared: a node joined, its status changed, or a request ended."""
        self._num_changes += 1
        self._call_next()

    def _call_next(self) -> None:
        for ticket in self._turns():
            ticket.trying, ticket.tried_at = True, self._num_changes
            ticket.may_try()

    def _turns(self) -> list[Ticket]:
        num_trying = sum(ticket.trying for ticket in self._queue)
        turns: list[Ticket] = []
        for ticket in self._queue:
            if num_trying + len(turns) >= self._max_trying:
                break
            if not ticket.trying and ticket.refused_at != self._num_changes:
                turns.append(ticket)
            if ticket.refused_at is not None:
                break  # it was refused before: the rest wait behind it
        return turns
