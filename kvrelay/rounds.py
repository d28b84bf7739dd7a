"""Which of several coordinators is asked next, and when. Pure: told the time, in seconds of any clock."""

from __future__ import annotations

import random
from collections.abc import Callable

PAUSE_S = 0.1  # before one that failed is asked again; doubles with each round
MAX_PAUSE_S = 2.0
JITTER = 0.5  # of a pause, at most so much on top: clients that lost one coordinator should not come back as one


class Rounds:
    """One call's attempts: each coordinator once, then, after pauses, again, in `num_rounds` rounds at most."""

    def __init__(self, num: int, first: int, num_rounds: int, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self.current = first
        self._num = num
        self._num_rounds = num_rounds
        self._draw = draw
        self._num_failures = [0] * num
        self._has_failures = False
        self._not_before = [0.0] * num

    def next(self, retry_after_s: float, now: float, *, stay: bool = False) -> float | None:
        """The current one failed, and said when to come back, or 0. The pause before what is `current` now is asked;
        None when there were attempts enough. `stay`: the same one, if it may be asked again at all."""
        failed = self.current
        pause_s = min(PAUSE_S * 2 ** self._num_failures[failed], MAX_PAUSE_S)
        self._num_failures[failed] += 1
        self._has_failures = True
        self._not_before[failed] = now + max(pause_s, retry_after_s) * (1 + JITTER * self._draw())
        left = [index for index in self._in_turn(failed) if self._num_failures[index] < self._num_rounds]
        if not left:
            return None
        if not stay or failed not in left:
            self.current = min(left, key=lambda index: max(self._not_before[index], now))
        return max(self._not_before[self.current] - now, 0.0)

    def advanced(self) -> None:
        """The current one gave something new, so failures from now on count anew."""
        if self._has_failures:
            self._num_failures, self._has_failures = [0] * self._num, False

    def _in_turn(self, failed: int) -> list[int]:
        """The others first."""
        return [(failed + step) % self._num for step in range(1, self._num + 1)]
