"""Timers that run when a test moves the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class VirtualTimer:
    at: float
    then: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualTimers:
    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[VirtualTimer] = []

    def later(self, delay_s: float, then: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(self.now + delay_s, then)
        self._timers.append(timer)
        return timer

    @property
    def num_pending(self) -> int:
        return sum(not timer.is_cancelled for timer in self._timers)

    def pass_time(self, seconds: float) -> None:
        """Runs what is due by then, in order."""
        end = self.now + seconds
        while due := [timer for timer in self._timers if timer.at <= end and not timer.is_cancelled]:
            first = min(due, key=lambda timer: timer.at)
            self._timers.remove(first)
            self.now = first.at
            first.then()
        self.now = end
