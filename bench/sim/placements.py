"""Where to send the turns of conversations: by load, by cache, by both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from bench.sim.cluster import Setup, simulate
from bench.sim.load import Arrival, cut, mooncake, paced
from bench.sim.pairs import PairCost
from bench.sim.placing import LeastLoaded, PrefixAffinity, RoundRobin, Routed
from bench.sim.results import capacity_per_s, finished, hit_rate, imbalance, quantile, ttfts_s
from bench.sim.shapes import NodeShape, StepTime
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines

MAX_TOKENS = 2_048
LONGEST = 16_000  # tokens of a prompt: three of four are no longer
# An 8B model on GPUs of 80 GB: 480,000 tokens of KV each, 9,000 tokens of prompt a second.
SETUP = Setup(
    num_prefill=6,
    num_decode=4,
    shape=NodeShape(
        num_decode_blocks=30_000,
        num_prefill_blocks=30_000,
        decode=StepTime(0.010, 0.000_2, 0.000_11),
        prefill=StepTime(0.004, 0.0, 0.000_1),
        link_bytes_per_s=1e10,
    ),
)
POLICIES = {policy.name: policy for policy in (RoundRobin, LeastLoaded, PrefixAffinity, Routed, PairCost)}
FACTORS = (0.5, 0.9)


@dataclass(frozen=True, slots=True)
class Task:
    policy: str
    number: int
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    hit_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    imbalance: float
    answers: float  # share of all requests


@cache
def slice_of(number: int, options: Options) -> tuple[list[Arrival], float]:
    """And how many of its requests a second the cluster can end when nodes are taken in turn."""
    trace = mooncake("conversation", MAX_TOKENS, LONGEST)
    arrivals = cut(trace, number, options.num_slices)[: options.num_requests]
    return arrivals, capacity_per_s(replace(SETUP, placing=RoundRobin), arrivals, number)


def measure(task: Task) -> dict[float, Measured]:
    """By load, as a multiple of what the cluster can do with the slice when nodes are taken in turn."""
    arrivals, capacity = slice_of(task.number, task.options)
    measured = {}
    for factor in FACTORS:
        setup = replace(SETUP, placing=POLICIES[task.policy])
        run = simulate(setup, paced(arrivals, factor * capacity), task.number)
        ttfts = ttfts_s(run)
        measured[factor] = Measured(
            hit_rate(run),
            quantile(ttfts, 0.5),
            quantile(ttfts, 0.95),
            imbalance(run.prefill_tokens),
            len(finished(run)) / len(arrivals),
        )
    return measured


def report(options: Options) -> str:
    tasks = [Task(policy, number, options) for policy in POLICIES for number in range(options.num_slices)]
    groups = measure_lines(measure, tasks, lambda task, factor: (factor, task.policy), options)
    rows = [
        [
            *(f"{factor:g}x", policy),
            cell([100 * one.hit_rate for one in group], ".1f"),
            cell([one.ttft_p50_s for one in group]),
            cell([one.ttft_p95_s for one in group]),
            cell([one.imbalance for one in group]),
            cell([100 * one.answers for one in group], ".1f"),
        ]
        for (factor, policy), group in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    columns = ("load", "placement", "hit rate, %", "TTFT p50, s", "TTFT p95, s", "most / mean work", "answered, %")
    return (
        "Placement (virtual time): turns of conversations (Mooncake), 6 prefill and 4 decode nodes; hits are prompt "
        "tokens found where the prompt was computed, work is prompt tokens computed by a prefill node; 1x is what the "
        f"cluster can do when nodes are taken in turn\n\n{table(columns, rows)}"
    )
