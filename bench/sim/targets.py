"""What it is worth to refuse at the door what would miss its targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from bench.sim.cluster import Setup, simulate
from bench.sim.load import Arrival, azure, cut, paced
from bench.sim.results import Goal, capacity_per_s, finished, goodput, quantile, ttfts_s
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines
from coordinator.slo import NO_TARGETS, Targets

MAX_TOKENS = 1_024
GOAL = Goal(ttft_s=2.0, itl_s=0.05)
SETUP = Setup(num_prefill=3, num_decode=1)
POLICIES = {"let in": NO_TARGETS, "refused": Targets(GOAL.ttft_s, GOAL.itl_s)}
FACTORS = (0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Task:
    policy: str
    number: int
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    goodput_per_s: float
    ttft_p95_s: float
    refused: float  # of 1,000 requests
    error_p50_s: float  # of what was predicted of those let in
    error_p95_s: float


@cache
def slice_of(number: int, options: Options) -> tuple[list[Arrival], float]:
    """And how many of its requests a second the cluster can end."""
    arrivals = cut(azure("conv", MAX_TOKENS), number, options.num_slices)[: options.num_requests]
    return arrivals, capacity_per_s(SETUP, arrivals, number)


def measure(task: Task) -> dict[float, Measured]:
    """By load, as a multiple of what the cluster can do with the slice."""
    arrivals, capacity = slice_of(task.number, task.options)
    measured = {}
    for factor in FACTORS:
        load = paced(arrivals, factor * capacity)
        run = simulate(replace(SETUP, targets=POLICIES[task.policy]), load, task.number)
        done = finished(run)
        errors = [
            abs(request.ttft_s - request.predicted_s)
            for request in done
            if request.predicted_s is not None and request.ttft_s is not None
        ]
        measured[factor] = Measured(
            goodput(run, GOAL, load[-1].at),
            quantile(ttfts_s(run), 0.95),
            1_000 * (1 - len(done) / len(load)),
            quantile(errors, 0.5),
            quantile(errors, 0.95),
        )
    return measured


def report(options: Options) -> str:
    tasks = [Task(policy, number, options) for policy in POLICIES for number in range(options.num_slices)]
    groups = measure_lines(measure, tasks, lambda task, factor: (factor, task.policy), options)
    rows = [
        [
            *(f"{factor:g}x", policy),
            cell([one.goodput_per_s for one in group]),
            cell([one.ttft_p95_s for one in group]),
            cell([one.refused for one in group], ".0f"),
            cell([one.error_p50_s for one in group]),
            cell([one.error_p95_s for one in group]),
        ]
        for (factor, policy), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    columns = (
        *("load", "out of reach", "goodput /s", "TTFT p95, s", "refused per 1,000"),
        *("TTFT predicted, error p50, s", "p95, s"),
    )
    return (
        f"Targets (virtual time): all want a TTFT of {GOAL.ttft_s:g} s and {1_000 * GOAL.itl_s:g} ms between tokens, "
        "as goodput counts; Azure conv, 3 prefill nodes and a decode node, nobody comes back"
        f"\n\n{table(columns, rows)}"
    )
