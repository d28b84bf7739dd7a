"""Runs that have nothing to do with each other, on as many processes as one likes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Options:
    num_requests: int  # of a run
    num_slices: int  # runs of each row
    jobs: int  # processes


def measure_all(measure: Callable[[T], R], tasks: Iterable[T], options: Options) -> list[R]:
    """Results in the order of the tasks."""
    if options.jobs == 1:
        return [measure(task) for task in tasks]
    with ProcessPoolExecutor(options.jobs) as pool:
        return list(pool.map(measure, tasks))
