"""Whose turn it is to send on a link that several handoffs share. Plain data, no I/O; who waits is told to look again.

A handoff with blocks to send queues up, and sends one message when it is first in line and the link's pace lets the
message go. So a long prompt does not hold up others, however much it has to send. All is counted in parts of slabs: a
slab that a message has room for is one part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvrelay.kv.frame import frame_bytes, frames_per_message, part_bytes
from prefill_node.pace import Pace, Sent


class Turns:
    """Of one link to a decode node. Belongs to the event loop."""

    def __init__(
        self, slab_bytes: int, on_carried: Callable[[int, float], None] = lambda num_bytes, seconds: None
    ) -> None:
        """`slab_bytes` is of the model's layout: a node serves one. `on_carried` is Pace's."""
        largest = part_bytes(slab_bytes)
        self.part_bytes = frame_bytes(largest)
        self.pace = Pace(self.part_bytes, self.part_bytes * frames_per_message(largest), on_carried)
        self._queue: deque[Turn] = deque()

    def is_first(self, turn: Turn) -> bool:
        """Whether none asked before; queues up who has not yet."""
        if turn not in self._queue:
            self._queue.append(turn)
        return self._queue[0] is turn

    def leave(self, turn: Turn) -> None:
        """Out of the queue; no error if it is not in there."""
        if turn in self._queue:
            self._queue.remove(turn)
            self.changed()

    def changed(self) -> None:
        """Tells the first in line that its message may go now."""
        if self._queue:
            self._queue[0].notify()


class Turn:
    """One handoff's part in a link. `close` gives the link back whatever it holds there, and must be called."""

    def __init__(self, turns: Turns, notify: Callable[[], None]) -> None:
        """`notify` is called when `num_parts` may answer otherwise than before."""
        self.notify = notify
        self._turns = turns
        self._unanswered: deque[Sent] = deque()

    def num_parts(self, num_waiting: int) -> int:
        """How many of the parts that wait (at least one) are to leave now, as one message; 0 while others are first,
        the link is full, or as much of its own as the link's bound is unanswered. Asking takes a place in the line,
        except in the last case."""
        part_bytes, pace = self._turns.part_bytes, self._turns.pace
        num_parts = min(num_waiting, pace.message_bytes // part_bytes)
        unanswered_bytes = sum(message.num_bytes for message in self._unanswered)
        if unanswered_bytes and unanswered_bytes + num_parts * part_bytes > pace.bound_bytes:
            self._turns.leave(self)  # it has its share, whether or not the link is known to have delivered it
            return 0
        return num_parts if self._turns.is_first(self) and pace.fits(num_parts * part_bytes) else 0

    def sent(self, num_parts: int, now: float) -> None:
        """So many parts leave, as `num_parts` said; the next in line is told."""
        self._unanswered.append(self._turns.pace.sent(num_parts * self._turns.part_bytes, now))
        self._turns.leave(self)

    def answered(self, now: float) -> None:
        """The oldest message that was not."""
        self._turns.pace.answered(self._unanswered.popleft(), now)
        self._turns.changed()

    def arrived_before(self, sent_at: float, now: float) -> None:
        """A message without a turn, sent at that time, was answered."""
        self._turns.pace.arrived_before(sent_at, now)
        self._turns.changed()

    def close(self) -> None:
        """The handoff is over, however it ended."""
        while self._unanswered:
            self._turns.pace.forgotten(self._unanswered.popleft())
        self._turns.leave(self)
        self._turns.changed()
