"""Once to twice of what a cluster can do, for ten minutes, of three tenants; who is refused comes back as told."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean

from bench.sim.cluster import Run, Setup, simulate
from bench.sim.load import Arrival, azure, cut, mooncake
from bench.sim.request import SimRequest
from bench.sim.reserving import Expected
from bench.sim.results import Goal, capacity_per_s, finished, goodput, quantile, ttfts_s
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines
from coordinator.slo import NO_TARGETS, Targets
from coordinator.tenant_policy import parse_policies

GOAL = Goal(ttft_s=2.0, itl_s=0.05)
MINUTES = 10.0  # of a run of FULL_REQUESTS or more, less of a shorter one
FULL_REQUESTS = 1_000
FACTORS = (1.0, 1.5, 2.0)
POLICIES = {"none": NO_TARGETS, "2 s, 50 ms": Targets(GOAL.ttft_s, GOAL.itl_s)}
WEIGHTS = {"chat": 3.0, "code": 2.0, "documents": 1.0}
SETUP = Setup(
    num_prefill=3,
    num_decode=1,
    policies=parse_policies("chat:weight=3;code:weight=2;documents:weight=1;*:weight=0.01"),
    reserving=partial(Expected, 0.9),
    max_returns=20,
)


@dataclass(frozen=True, slots=True)
class Task:
    targets: str
    factor: float
    number: int
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    answers_per_s: float  # while the load lasts
    goodput_per_s: float
    good_tokens_per_s: float  # of prompts and answers that goodput counts
    ttft_p95_s: float
    queue_mean: float
    queue_max: float
    shares: dict[str, float]  # of tokens charged, by tenant
    returned: float  # share of those who came back as told that were let in; nan: nobody was turned away


def requests_of(tenant: str, number: int, num_slices: int) -> Iterator[Arrival]:
    """Without end: the slice of its trace again and again, times not yet set."""
    trace = {
        "chat": lambda: azure("conv", 1_024),
        "code": lambda: azure("code", 256),
        "documents": lambda: mooncake("synthetic", 512, 16_000),
    }[tenant]()
    part = [replace(one, tenant=tenant, hash_ids=()) for one in cut(trace, number, num_slices)]
    return itertools.cycle(part)


def wanted(arrival: Arrival) -> int:
    """Tokens at its longest: what is set aside, and charged, gets less once answers are known."""
    return arrival.num_prompt + arrival.max_tokens


def mixed(number: int, num_slices: int, num_requests: int) -> list[Arrival]:
    """The tenants' requests in an order in which each asks for its share of tokens, one a second in all."""
    streams = {tenant: requests_of(tenant, number, num_slices) for tenant in WEIGHTS}
    turns = [(0.0, tenant) for tenant in sorted(WEIGHTS)]
    load = []
    for at in range(num_requests):
        asked, tenant = heapq.heappop(turns)
        arrival = next(streams[tenant])
        load.append(replace(arrival, at=float(at)))
        heapq.heappush(turns, (asked + wanted(arrival) / WEIGHTS[tenant], tenant))
    return load


def minutes_of(options: Options) -> float:
    return MINUTES * min(1.0, options.num_requests / FULL_REQUESTS)


@cache
def capacity_of(number: int, options: Options) -> float:
    """Requests a second."""
    return capacity_per_s(SETUP, mixed(number, options.num_slices, min(options.num_requests, 600)), number)


def measure(task: Task) -> dict[float, Measured]:
    options, capacity = task.options, capacity_of(task.number, task.options)
    per_s = task.factor * capacity
    load = mixed(task.number, options.num_slices, int(per_s * 60.0 * minutes_of(options)))
    load = [replace(arrival, at=arrival.at / per_s) for arrival in load]
    run = simulate(replace(SETUP, targets=POLICIES[task.targets]), load, task.number)
    return {task.factor: _measured(run, load[-1].at)}


def _measured(run: Run, seconds: float) -> Measured:
    within = [request for request in finished(run) if (request.ended_at or 0.0) <= seconds]
    tokens = Counter[str]()
    for request in _served(run, seconds):
        tokens[request.arrival.tenant] += request.num_charged
    queued = [sum(places.values()) for places in run.queued]
    return Measured(
        len(within) / seconds,
        goodput(run, GOAL, seconds),
        sum(_num_tokens(request) for request in run.requests if GOAL.met(request)) / seconds,
        quantile(ttfts_s(run), 0.95),
        mean(queued),
        max(queued),
        {tenant: tokens[tenant] / tokens.total() for tenant in WEIGHTS},
        mean(run.returns) if run.returns else float("nan"),
    )


def _num_tokens(request: SimRequest) -> int:
    return request.arrival.num_prompt + request.arrival.num_output


def _served(run: Run, seconds: float) -> list[SimRequest]:
    """Those that were given room while all asked."""
    return [request for request in run.requests if request.granted_at is not None and request.granted_at <= seconds]


def report(options: Options) -> str:
    tasks = [
        Task(targets, factor, number, options)
        for targets in POLICIES
        for factor in FACTORS
        for number in range(options.num_slices)
    ]
    groups = measure_lines(measure, tasks, lambda task, factor: (task.targets, factor), options)
    rows = [
        [
            *(targets, f"{factor:g}x"),
            cell([one.answers_per_s for one in group]),
            cell([one.goodput_per_s for one in group]),
            cell([one.good_tokens_per_s for one in group], ",.0f"),
            cell([one.ttft_p95_s for one in group], ".1f"),
            cell([one.queue_mean for one in group], ".0f"),
            cell([one.queue_max for one in group], ".0f"),
            *(cell([100 * one.shares[tenant] for one in group], ".1f") for tenant in WEIGHTS),
            cell([100 * one.returned for one in group], ".1f"),
        ]
        for (targets, factor), group in groups.items()
    ]
    total = sum(WEIGHTS.values())
    columns = (
        *(
            "targets",
            "load",
            "answers /s",
            "goodput /s",
            "goodput, tokens/s",
            "TTFT p95, s",
            "queued, mean",
            "queued, most",
        ),
        *(f"{tenant}, % of tokens ({100 * weight / total:.0f})" for tenant, weight in WEIGHTS.items()),
        "of those who came back as told, let in, %",
    )
    return (
        f"Overload (virtual time): {minutes_of(options):g} minutes, each tenant asks for so many times its share; "
        f"goodput counts answers with TTFT within {GOAL.ttft_s:g} s and a mean time between tokens within "
        f"{1_000 * GOAL.itl_s:g} ms\n\n{table(columns, rows)}"
    )
