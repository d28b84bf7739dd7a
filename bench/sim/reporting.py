"""How a node's state reaches the coordinator: late, and only so often."""

from __future__ import annotations

import math
from collections.abc import Callable

from bench.sim.clock import VirtualClock
from kvrelay.cluster import CacheEvents, NodeStatus
from kvrelay.kv.pool import BlockPool


class Reports:
    """Sent every `interval_s` where something `changed`: read when it is sent, and seen `call_s` later."""

    def __init__(
        self,
        clock: VirtualClock,
        pool: BlockPool,
        status: Callable[[], NodeStatus],
        *,
        seen: Callable[[NodeStatus], None],
        told: Callable[[CacheEvents], object],
        interval_s: float,
        call_s: float,
        first_at: float,
    ) -> None:
        """`first_at` is when the node sends its first one. `told` hears of the blocks of `pool` that came and went,
        with each status."""
        self._clock = clock
        self._status = status
        self._seen = seen
        self._told = told
        self._feed = pool.named.open_feed(self.changed)
        self._interval_s = interval_s
        self._call_s = call_s
        self._first_at = first_at
        self._is_planned = False
        self._feed.begin()
        self.changed()

    def changed(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            num_before = math.ceil((self._clock.now - self._first_at) / self._interval_s)
            self._clock.at(self._first_at + max(0, num_before) * self._interval_s, self._send)

    def _send(self) -> None:
        self._is_planned = False
        self._clock.after(self._call_s, self._seen, self._status())
        while (events := self._feed.take()) is not None:
            self._clock.after(self._call_s, self._told, events)
