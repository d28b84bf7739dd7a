"""Bytes, time and CPU of transfers, the same for whatever moves them. Standard library only."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable

from bench.handoff.pace import cpu_seconds

PATTERN = b"\x3f"
NUM_WARM_UP = 3  # transfers before the counted ones: connections, and the allocator, which takes a few to settle


def allocate(num_bytes: int) -> mmap.mmap:
    """Memory as a KV pool's is: anonymous, in large pages where there are some, and touched."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = PATTERN * num_bytes
    return memory


class Meter:
    """Adds up transfers from this process to another. Only the time inside `transfer` counts, on either side."""

    def __init__(self, peer_pid: int) -> None:
        self._peer_pid = peer_pid
        self._started = (0.0, 0.0, 0.0)
        self.num_bytes = 0
        self.wall_s = self.cpu_s = self.peer_cpu_s = 0.0

    def start(self) -> None:
        self._started = self._readings()

    def stop(self, num_bytes: int) -> None:
        wall_s, cpu_s, peer_cpu_s = (now - then for now, then in zip(self._readings(), self._started, strict=True))
        self.num_bytes += num_bytes
        self.wall_s += wall_s
        self.cpu_s += cpu_s
        self.peer_cpu_s += peer_cpu_s

    def report(self) -> dict[str, float]:
        """Bytes a second, and CPU seconds a byte of the sending and of the receiving process."""
        return {
            "bytes_per_s": self.num_bytes / self.wall_s,
            "sender_cpu_s": self.cpu_s / self.num_bytes,
            "receiver_cpu_s": self.peer_cpu_s / self.num_bytes,
        }

    def _readings(self) -> tuple[float, float, float]:
        return time.perf_counter(), cpu_seconds(os.getpid()), cpu_seconds(self._peer_pid)


def measure(transfer: Callable[[], int], peer_pid: int, seconds: float) -> dict[str, float]:
    """Runs `transfer`, which gives the bytes it moved, over and over for so long, and once at least."""
    for _ in range(NUM_WARM_UP):
        transfer()
    meter = Meter(peer_pid)
    while not meter.num_bytes or meter.wall_s < seconds:
        meter.start()
        meter.stop(transfer())
    return meter.report()
