"""Runs that have nothing to do with each other, on as many processes as one likes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Options:
    num_requests: int  # of a run
    num_slices: int  # runs of each row
    jobs: int  # processes


def measure_lines(
    measure: Callable[[T], Mapping[float, R]],
    tasks: Sequence[T],
    line_of: Callable[[T, float], L],
    options: Options,
) -> dict[L, list[R]]:
    """What the runs of each line of a table gave, in the order of the tasks. A task gives what was measured by load."""
    lines = defaultdict[L, list[R]](list)
    for task, measured in zip(tasks, _measure_all(measure, tasks, options.jobs), strict=True):
        for factor, one in measured.items():
            lines[line_of(task, factor)].append(one)
    return lines


def _measure_all(measure: Callable[[T], R], tasks: Sequence[T], jobs: int) -> list[R]:
    if jobs == 1:
        return [measure(task) for task in tasks]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(measure, tasks))
