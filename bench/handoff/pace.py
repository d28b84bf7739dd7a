"""How fast KV is let go, and the CPU time that moving it takes."""

from __future__ import annotations

import math
import time

NONE = 0.0
FULL = math.inf  # as fast as it goes
MB = 1e6
GB = 1e9


def blocks_due(bytes_per_s: float, elapsed_s: float, slab_bytes: int, num_blocks: int) -> int:
    """How many of a prompt's blocks are computed, so to say, `elapsed_s` after its start: whole ones only."""
    if math.isinf(bytes_per_s):
        return num_blocks
    return min(num_blocks, int(bytes_per_s * elapsed_s / slab_bytes))


def name_of(bytes_per_s: float) -> str:
    if bytes_per_s == NONE:
        return "no handoff"
    return "full rate" if math.isinf(bytes_per_s) else f"{bytes_per_s / MB:.0f} MB/s"


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, another's too. Linux alone: the clock id is made as glibc makes it.

    Raises OSError if there is no such process.
    """
    return time.clock_gettime((~pid << 3) | 2)
