"""How much may be on the way over one link: as much as it carries in a quarter of a second. Plain data, no I/O.

HTTP/2 pings, which tell a living peer from a dead one, wait behind every byte of their connection that has not arrived;
so what all handoffs of a link have on the way together decides how late a ping is, and it must be late by far less than
the ping timeout (2 s). The rate is measured as BBR does (draft-ietf-ccwg-bbr): what was answered from a message's
sending to its answer, over the time from the answer before it. The bound starts small, at most doubles with an answer
that came in time (slow start, as in RFC 5681), and falls at once to what the link carries when one came late.

A connection delivers in order. So an answer to anything shows that all that was sent before it has arrived, and what a
stream leaves unanswered for reasons of its own does not hold up the others. (Streams overtake each other only before
gRPC has given their bytes to the socket; by no more than each stream's own bound, see Turn. On a slow connection they
do not: tests/integration/test_link_order.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TARGET_S = 0.25  # an eighth of the ping timeout: room for a rate that falls, and for pings of the other side
FIRST_BYTES = 2**17  # for a link not known yet: 0.7 s at 0.2 MB/s
MESSAGES = 2  # full ones, at most; a third gains no throughput and costs latency to everyone on the connection


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A message on the way, with what was known when it left."""

    num_bytes: int
    sent_at: float
    answered_bytes: int  # by the link until then
    answered_at: float  # when that became so; `sent_at` where nothing else was on the way


class Pace:
    """Of one link. Times are of any one clock, in seconds."""

    def __init__(
        self,
        part_bytes: int,
        message_bytes: int,
        on_carried: Callable[[int, float], None] = lambda num_bytes, seconds: None,
    ) -> None:
        """`part_bytes` is what the largest part of a slab takes of a message, `message_bytes` what all take that a
        message holds. `on_carried` hears of bytes that arrived, and in how many seconds, whenever a message tells."""
        self._on_carried = on_carried
        self._part_bytes = part_bytes
        self._message_bytes = message_bytes
        self._most_bytes = MESSAGES * message_bytes
        self._answered_bytes = 0
        self._answered_at = 0.0
        self.bound_bytes = self._within(FIRST_BYTES)
        self.in_flight_bytes = 0
        self._on_the_way: list[Sent] = []  # in the order of sending

    @property
    def message_bytes(self) -> int:
        """Most that the next message may have: half of the bound, so that the link has work while one is answered."""
        return max(self._part_bytes, min(self._message_bytes, self.bound_bytes // MESSAGES))

    def fits(self, num_bytes: int) -> bool:
        """Whether a message of this size may leave now."""
        return self.in_flight_bytes + num_bytes <= self.bound_bytes

    def sent(self, num_bytes: int, now: float) -> Sent:
        """Counts a message that fitted, until it is `answered` or `forgotten`."""
        if self.in_flight_bytes == 0:
            self._answered_at = now  # the link was idle: that time says nothing about it
        self.in_flight_bytes += num_bytes
        message = Sent(num_bytes, now, self._answered_bytes, self._answered_at)
        self._on_the_way.append(message)
        return message

    def arrived_before(self, sent_at: float, now: float) -> None:
        """Something sent at that time was answered: what left sooner has arrived, answered or not."""
        for message in [message for message in self._on_the_way if message.sent_at < sent_at]:
            self.forgotten(message)
            self._answered_bytes += message.num_bytes
            self._answered_at = now  # with their bytes their time is counted: what leaves from now on begins here

    def answered(self, message: Sent, now: float) -> None:
        """Its bytes have arrived. Where that was known before, its answer says nothing about the link."""
        self.arrived_before(message.sent_at, now)
        if message not in self._on_the_way:
            return
        self.forgotten(message)
        self._answered_bytes += message.num_bytes
        self._answered_at = now
        num_bytes, seconds = self._answered_bytes - message.answered_bytes, now - message.answered_at
        self._on_carried(num_bytes, seconds)
        carried = self._carries(num_bytes, seconds)
        if now - message.sent_at > TARGET_S:
            self.bound_bytes = self._within(min(self.bound_bytes, carried))
        elif carried > self.bound_bytes:
            self.bound_bytes = self._within(min(2 * self.bound_bytes, carried))

    def forgotten(self, message: Sent) -> None:
        """It is not waited for: its stream is over, what has not left yet never will, and no answer comes. Twice is no
        error."""
        if message in self._on_the_way:
            self._on_the_way.remove(message)
            self.in_flight_bytes -= message.num_bytes

    def _carries(self, num_bytes: int, seconds: float) -> int:
        """In TARGET_S, at this rate."""
        if seconds * self._most_bytes <= num_bytes * TARGET_S:  # also where the clock did not move
            return self._most_bytes
        return int(num_bytes * TARGET_S / seconds)

    def _within(self, num_bytes: int) -> int:
        return max(self._part_bytes, min(self._most_bytes, num_bytes))
