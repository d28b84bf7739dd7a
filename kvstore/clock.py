"""The store's own time, which goes on from one process to the next and never jumps.

Blocks live for a time after their last use, across restarts too, and the wall clock may be set at any moment. So what
is written down is the directory's age: while a process runs it grows with the monotonic clock; between two processes
of one boot by the kernel's time since boot; between two boots by the wall clock, if that went forward at all.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


def seconds_since_boot() -> float:
    """Sleep counted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The machine's, all in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    since_boot: Callable[[], float] = seconds_since_boot
    wall: Callable[[], float] = time.time
    boot_id: str = field(default="")  # "" is told from every other boot, even from itself


@dataclass(frozen=True, slots=True)
class _Mark:
    """When something was last written down."""

    age_s: float
    since_boot_s: float
    wall_s: float
    boot_id: str


class StoreClock:
    """Turns times of this process's monotonic clock into ages of the directory, and back."""

    def __init__(self, clocks: Clocks, mark: bytes | None) -> None:
        """`mark` is what an earlier process wrote down last; what cannot be read counts as none."""
        self._clocks = clocks
        last, now = None if mark is None else _read(mark), clocks.monotonic()  # before the others: see `mark`
        age_s = 0.0 if last is None else last.age_s + self._elapsed_s(last)
        self._birth = now - age_s  # of the directory, by this process's monotonic clock

    def age_of(self, monotonic: float) -> float:
        """What to write down for a time of this process."""
        return monotonic - self._birth

    def monotonic_of(self, age_s: float) -> float:
        """The time of this process for what an earlier one wrote down."""
        return age_s + self._birth

    def mark(self) -> bytes:
        """To be written down with every transaction.

        The process may stand still between two readings. Their order makes that part of the time between this process
        and the next: what is here already may seem older then, and never younger than what the next one puts.
        """
        since_boot_s, wall_s, now = self._clocks.since_boot(), self._clocks.wall(), self._clocks.monotonic()
        return json.dumps((self.age_of(now), since_boot_s, wall_s, self._clocks.boot_id)).encode()

    def _elapsed_s(self, last: _Mark) -> float:
        if last.boot_id == self._clocks.boot_id != "":
            return max(0.0, self._clocks.since_boot() - last.since_boot_s)
        return max(0.0, self._clocks.wall() - last.wall_s)


def _read(mark: bytes) -> _Mark | None:
    try:
        age_s, since_boot_s, wall_s, boot_id = json.loads(mark)
        last = _Mark(float(age_s), float(since_boot_s), float(wall_s), str(boot_id))
    except (ValueError, TypeError):
        return None
    return last if math.isfinite(last.age_s + last.since_boot_s + last.wall_s) else None
