"""How long what waits in the coordinator will wait. Pure; times are seconds of one clock.

Room is counted in the tokens that requests want (`queue.Demand`), and so is the pace at which it comes free: the tokens
that found room lately, over the time in which something had to wait for it. While nothing has to, time does not count:
room that nobody lacked says nothing of how fast it comes free.
"""

from __future__ import annotations

from collections import deque

from coordinator.stopwatch import Stopwatch

NUM_ADMITTED = 64  # that found room last, by which the pace is told
MIN_ADMITTED = 2  # fewer say nothing


class AdmittedPace:
    """Tokens that find room while others lack it."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=NUM_ADMITTED + 1)  # when, by `_lacking`; tokens
        self._lacking = Stopwatch()  # runs while room lacks

    @property
    def lacks_room(self) -> bool:
        """Something was refused room, and something waited ever since."""
        return self._lacking.runs

    def begin(self, now: float) -> None:
        """Something was refused room."""
        self._lacking.start(now)
        if not self._marks:
            self._marks.append((self._lacking.elapsed(now), 0))

    def end(self, now: float) -> None:
        """Nothing waits any more."""
        self._lacking.stop(now)

    def admitted(self, num_tokens: int, now: float) -> None:
        """So many found room."""
        if self._lacking.runs:
            self._marks.append((self._lacking.elapsed(now), num_tokens))

    def tokens_per_s(self, now: float) -> float | None:
        """None while too little found room in want of it."""
        if len(self._marks) <= MIN_ADMITTED:
            return None
        num_tokens = sum(tokens for _, tokens in self._marks) - self._marks[0][1]
        span_s = self._lacking.elapsed(now) - self._marks[0][0]
        return num_tokens / span_s if num_tokens > 0 and span_s > 0 else None
