"""How much to set aside for an answer: all of max_tokens, or what answers usually take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from bench.sim.cluster import Setup, simulate
from bench.sim.load import Arrival, azure, cut, paced
from bench.sim.reserving import Expected, Full
from bench.sim.results import Goal, capacity_per_s, finished, goodput, quantile, ttfts_s
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines

MAX_TOKENS = 1_024
GOAL = Goal(ttft_s=2.0, itl_s=0.05)
SETUPS = {"conv": Setup(num_prefill=3, num_decode=1), "code": Setup(num_prefill=4, num_decode=1)}
POLICIES = {"full": Full, "expected, 0.5": partial(Expected, 0.5), "expected, 0.9": partial(Expected, 0.9)}
FACTORS = (0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Task:
    trace: str
    policy: str
    number: int  # of the slice
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    """At one load."""

    goodput_per_s: float
    answers_per_s: float
    ttft_p95_s: float
    num_preemptions: float  # of 1,000 answers
    turned_away: float  # of 1,000 requests, and those that gave up


@cache
def slice_of(trace: str, number: int, options: Options) -> tuple[list[Arrival], float]:
    """And how many of its requests a second `full` can end."""
    arrivals = cut(azure(trace, MAX_TOKENS), number, options.num_slices)[: options.num_requests]
    return arrivals, capacity_per_s(SETUPS[trace], arrivals, number)


def measure(task: Task) -> dict[float, Measured]:
    """By load, as a multiple of what `full` can do with the slice."""
    arrivals, capacity = slice_of(task.trace, task.number, task.options)
    setup = SETUPS[task.trace]
    measured = {}
    for factor in FACTORS:
        load = paced(arrivals, factor * capacity)
        run = simulate(replace(setup, reserving=POLICIES[task.policy]), load, task.number)
        done = finished(run)
        measured[factor] = Measured(
            goodput(run, GOAL, load[-1].at),
            len(done) / run.seconds,
            quantile(ttfts_s(run), 0.95),
            1_000 * sum(request.num_preemptions for request in done) / len(done),
            1_000 * (1 - len(done) / len(load)),
        )
    return measured


def report(options: Options) -> str:
    tasks = [
        Task(trace, policy, number, options)
        for trace in SETUPS
        for policy in POLICIES
        for number in range(options.num_slices)
    ]
    groups = measure_lines(measure, tasks, lambda task, factor: (task.trace, factor, task.policy), options)
    rows = [
        [
            *(trace, f"{factor:g}x", policy),
            cell([one.goodput_per_s for one in group]),
            cell([one.answers_per_s for one in group]),
            cell([one.ttft_p95_s for one in group], ".1f"),
            cell([one.num_preemptions for one in group], ".0f"),
            cell([one.turned_away for one in group], ".0f"),
        ]
        for (trace, factor, policy), group in sorted(groups.items(), key=lambda item: item[0][:2])
    ]
    columns = (
        *("Azure trace", "load", "set aside", "goodput /s", "answers /s", "TTFT p95, s"),
        *("preemptions per 1,000", "turned away per 1,000"),
    )
    return (
        f"Reservations (virtual time): goodput counts answers with TTFT within {GOAL.ttft_s:g} s and a mean time "
        f"between tokens within {1_000 * GOAL.itl_s:g} ms; 1x is what `full` can do\n\n{table(columns, rows)}"
    )
