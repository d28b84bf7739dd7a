"""Bytes a second of something done over and over. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable


async def rate_of(transfer: Callable[[], Awaitable[int]], seconds: float) -> float:
    """`transfer` gives the bytes that it moved. It runs once uncounted, then for so long, and once at least."""
    await transfer()
    num_bytes, started = 0, time.perf_counter()
    while not num_bytes or time.perf_counter() - started < seconds:
        num_bytes += await transfer()
    return num_bytes / (time.perf_counter() - started)


def blocking_rate_of(transfer: Callable[[], int], seconds: float) -> float:
    """As `rate_of`."""
    transfer()
    num_bytes, started = 0, time.perf_counter()
    while not num_bytes or time.perf_counter() - started < seconds:
        num_bytes += transfer()
    return num_bytes / (time.perf_counter() - started)
