"""Which prompts a decode node computes itself: those of few tokens, or those that cost less there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from bench.sim.cluster import Setup, simulate
from bench.sim.load import Arrival, azure, cut, paced
from bench.sim.pairs import PairCost
from bench.sim.results import capacity_per_s, finished, quantile, ttfts_s
from bench.sim.shapes import NodeShape
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines

MAX_TOKENS = 1_024
BY_COST = Setup(num_prefill=3, num_decode=2)
POLICIES = {
    "never": replace(BY_COST, placing=partial(PairCost, 0)),
    "up to 32 tokens": replace(BY_COST, shape=NodeShape(tells_prompt_rate=False)),
    "by cost": BY_COST,
}
FACTORS = (0.25, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Task:
    policy: str
    number: int
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    tails: float  # of 100 answers
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float


@cache
def slice_of(number: int, options: Options) -> tuple[list[Arrival], float]:
    """And how many of its requests a second the cluster can end without such prompts."""
    arrivals = cut(azure("conv", MAX_TOKENS), number, options.num_slices)[: options.num_requests]
    return arrivals, capacity_per_s(POLICIES["never"], arrivals, number)


def measure(task: Task) -> dict[float, Measured]:
    """By load, as a multiple of what the cluster can do with the slice without such prompts."""
    arrivals, capacity = slice_of(task.number, task.options)
    measured = {}
    for factor in FACTORS:
        run = simulate(POLICIES[task.policy], paced(arrivals, factor * capacity), task.number)
        done, ttfts = finished(run), ttfts_s(run)
        itls = [request.itl_s for request in done if request.arrival.num_output > 1]
        measured[factor] = Measured(
            100 * sum(request.is_tail for request in done) / len(done),
            quantile(ttfts, 0.5),
            quantile(ttfts, 0.95),
            quantile(itls, 0.5),
            quantile(itls, 0.95),
        )
    return measured


def report(options: Options) -> str:
    tasks = [Task(policy, number, options) for policy in POLICIES for number in range(options.num_slices)]
    groups = measure_lines(measure, tasks, lambda task, factor: (factor, task.policy), options)
    rows = [
        [
            *(f"{factor:g}x", policy),
            cell([one.tails for one in group], ".0f"),
            cell([one.ttft_p50_s for one in group]),
            cell([one.ttft_p95_s for one in group]),
            cell([1e3 * one.itl_p50_s for one in group], ".0f"),
            cell([1e3 * one.itl_p95_s for one in group], ".0f"),
        ]
        for (factor, policy), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    columns = (
        *("load", "computed on the decode node", "of answers, %", "TTFT p50, s", "TTFT p95, s"),
        *("between tokens p50, ms", "p95, ms"),
    )
    return (
        "Prompts on decode nodes (virtual time): Azure conv, 3 prefill and 2 decode nodes that compute prompts equally "
        f"fast; 1x is what the cluster can do without\n\n{table(columns, rows)}"
    )
