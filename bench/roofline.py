"""What a device can do at best, measured: memory bandwidth and rate of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Roofline:
    bytes_per_s: float  # the better of copying (read and written bytes) and of summing up
    flops_per_s: float  # the best of some shapes of bfloat16 products


def measure_roofline(device: str, size: int) -> Roofline:
    """`size` is the side of a square product; 16 * size^2 numbers of 2 bytes are copied."""
    return Roofline(
        bytes_per_s=_bandwidth(device, 16 * size * size),
        flops_per_s=max(_product_rate(device, size, side) for side in (size, 2 * size)),
    )


def _bandwidth(device: str, count: int) -> float:
    numbers = torch.ones(count, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(numbers)
    num_bytes = numbers.numel() * numbers.element_size()
    copied = 2 * num_bytes / best_time(device, lambda: other.copy_(numbers))
    return max(copied, num_bytes / best_time(device, lambda: numbers.sum()))


def _product_rate(device: str, rows: int, side: int) -> float:
    left = torch.randn(rows, side, dtype=torch.bfloat16, device=device)
    right = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    return 2 * rows * side * side / best_time(device, lambda: left @ right.t())


def best_time(device: str, run: Callable[[], object], num_times: int = 10, calls: int = 5) -> float:
    """Seconds of a call, of the best of several rounds after two to warm up."""
    times = []
    for _ in range(num_times + 2):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        times.append((time.perf_counter() - started) / calls)
    return min(times[2:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
