"""Virtual time: what happens next, in order. Pure; two events of one moment happen in the order they were asked for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Seconds from 0. `num_events` counts those that happened."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._num_planned = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, happen: Callable[..., None], *arguments: Any) -> None:
        """`happen` is called at `when`, or now if that is over."""
        heapq.heappush(self._events, (max(when, self.now), self._num_planned, happen, arguments))
        self._num_planned += 1

    def after(self, seconds: float, happen: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, happen, *arguments)

    def run(self, until: float = math.inf) -> None:
        """Returns when nothing is left to happen by then."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen, arguments = heapq.heappop(self._events)
            self.num_events += 1
            happen(*arguments)
