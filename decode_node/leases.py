"""Wakes the node when a reservation's lease lapses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_node.reservations import Reservations


class LeaseTimer:
    """One timer for all leases. Renewals only move deadlines back: it fires early then, and is armed again."""

    def __init__(self, reservations: Reservations, expire: Callable[[], None], clock: Callable[[], float]) -> None:
        """`expire` ends what has lapsed; `clock` is that of the reservations' times."""
        self._reservations = reservations
        self._expire = expire
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """After a grant; no error while it is armed, or while there is no lease."""
        deadline = self._reservations.next_deadline()
        if self._timer is None and deadline is not None:
            delay_s = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._timer = None
        self._expire()
        self.arm()
