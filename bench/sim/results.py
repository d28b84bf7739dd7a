"""What a run is judged by. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from bench.sim.cluster import Run, Setup, simulate
from bench.sim.load import Arrival
from bench.sim.request import Outcome, SimRequest


@dataclass(frozen=True, slots=True)
class Goal:
    """A request counts for goodput when it met both."""

    ttft_s: float = 2.0
    itl_s: float = 0.05  # mean of its answer

    def met(self, request: SimRequest) -> bool:
        return (
            request.outcome is Outcome.FINISHED
            and request.ttft_s is not None
            and request.ttft_s <= self.ttft_s
            and request.itl_s <= self.itl_s
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many are not above; nan of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def finished(run: Run) -> list[SimRequest]:
    return [request for request in run.requests if request.outcome is Outcome.FINISHED]


def goodput(run: Run, goal: Goal, asked_s: float) -> float:
    """Requests a second that met the goal, of those that came in `asked_s`."""
    return sum(map(goal.met, run.requests)) / asked_s


def ttfts_s(run: Run) -> list[float]:
    return [request.ttft_s for request in finished(run) if request.ttft_s is not None]


def hit_rate(run: Run) -> float:
    """Of prompt tokens, those found cached where the prompt was computed."""
    done = finished(run)
    found = sum(request.num_cached_decode if request.is_tail else request.num_cached_prefill for request in done)
    return found / sum(request.arrival.num_prompt for request in done)


def imbalance(loads: Sequence[float]) -> float:
    """The most loaded node's work over the mean one's."""
    return max(loads) / mean(loads) if any(loads) else math.nan


def capacity_per_s(setup: Setup, arrivals: Sequence[Arrival], seed: int = 0) -> float:
    """Requests a second that the cluster ends when all of them wait from the start, until the last twentieth, which
    leaves nodes idle."""
    waiting = [replace(arrival, at=0.0) for arrival in arrivals]
    patient = replace(setup, max_queue=len(arrivals) + 1, max_queue_wait_s=1e9)
    run = simulate(patient, waiting, seed)
    ends = sorted(request.ended_at or 0.0 for request in run.requests)
    num_counted = max(1, int(0.95 * len(ends)))
    return num_counted / (ends[num_counted - 1] - (run.requests[0].entered_at))
