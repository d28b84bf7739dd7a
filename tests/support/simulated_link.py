"""A link of a rate and a round trip, in simulated time, with handoffs on it that always have blocks to send."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from prefill_node.turns import Turn, Turns


@dataclass
class Stream:
    turn: Turn
    num_blocks: int = 0  # answered


@dataclass
class SimulatedLink:
    """Carries messages one after the other. What waits in it is what a ping sent now would wait for."""

    turns: Turns
    bytes_per_s: float
    round_trip_s: float = 0.001
    now: float = 0.0
    num_bytes: int = 0  # carried
    worst_ping_s: float = 0.0
    streams: list[Stream] = field(default_factory=list)
    _idle_at: float = 0.0
    _answers: list[tuple[float, int, Stream, int]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def open(self, num_streams: int) -> None:
        self.streams += [Stream(Turn(self.turns, lambda: None)) for _ in range(num_streams)]

    def run(self, seconds: float, *, waiting: int = 1_000) -> None:
        """Every stream has `waiting` blocks to send at any time."""
        end = self.now + seconds
        self._send(waiting)
        while self._answers and self._answers[0][0] <= end:
            self.now, _, stream, num_blocks = heapq.heappop(self._answers)
            stream.turn.answered(self.now)
            stream.num_blocks += num_blocks
            self._send(waiting)
        self.now = end

    def _send(self, waiting: int) -> None:
        asked = True
        while asked:
            asked = False
            for stream in self.streams:
                num_blocks = stream.turn.num_parts(waiting)
                if num_blocks:
                    self._carry(stream, num_blocks)
                    asked = True

    def _carry(self, stream: Stream, num_blocks: int) -> None:
        stream.turn.sent(num_blocks, self.now)
        assert self.turns.pace.in_flight_bytes <= self.turns.pace.bound_bytes
        num_bytes = num_blocks * self.turns.part_bytes
        self._idle_at = max(self._idle_at, self.now) + num_bytes / self.bytes_per_s
        self.num_bytes += num_bytes
        self.worst_ping_s = max(self.worst_ping_s, self._idle_at - self.now)
        answer_at = self._idle_at + self.round_trip_s
        heapq.heappush(self._answers, (answer_at, next(self._order), stream, num_blocks))
