"""When this process, which clients and proxies live in, was not run by a machine that had too much to do.

Through the proxies no ping passes in such a time, so peers rightly take each other for dead.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

TICK_S = 0.1
STALL_S = 1.0  # later than this a tick is a stall; a ping is given 2 s, and has two proxies to pass
AFTER_S = 6.0  # in which what a stall broke is found and mended


@dataclass(frozen=True, slots=True)
class Stall:
    """Moments of time.monotonic."""

    start: float
    end: float


class StallWatch:
    def __init__(self) -> None:
        self.stalls: list[Stall] = []

    async def run(self) -> None:
        """Until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.tick(last, now)
            last = now

    def tick(self, last: float, now: float) -> None:
        if now - last > TICK_S + STALL_S:
            self.stalls.append(Stall(last, now))

    def touches(self, start: float, end: float) -> bool:
        """Whether what happened in this time may have come from a stall."""
        return any(stall.start <= end and start <= stall.end + AFTER_S for stall in self.stalls)

    @property
    def worst_s(self) -> float:
        return max((stall.end - stall.start for stall in self.stalls), default=0.0)
