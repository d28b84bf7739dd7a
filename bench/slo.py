"""What early refusal is worth under overload: python -m bench.slo

Runs the coordinator's own admission and target code in virtual time, against a model of a cluster: one prefill node,
which computes prompts one after another, and one pool of KV memory, in which an answer holds what it asked for from its
turn until it has ended. Requests want their first token within a target. Who is refused comes back as told, or never.
A second table has three tenants whose weights and sizes of requests differ; each asks for as much of its share.
It reads no clock but to time the code itself, so all other numbers are the same on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from bench.sim.clock import VirtualClock
from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.forecast import Forecast
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.retry_advice import RetryAdvice
from coordinator.slo import NO_TARGETS, Prediction, SloAdmission, Targets
from coordinator.tenant_policy import parse_policies
from kvrelay.errors import OverloadedError

POOL_TOKENS = 200_000
PREFILL_TOKENS_PER_S = 16_000
MAX_PREFILLS = 4  # prompts on the prefill node at a time
STEP_S = 0.02  # a token of an answer
PROMPT_TOKENS, MAX_TOKENS = 1_000, 300  # means; exponential, cut at eight times
COLUMNS = (
    "load",
    "targets",
    "in time, of what can be served",
    "of those let in, in time",
    "refused",
    "of those who came back, let in",
    "told p50 / max, s",
    "error of the prediction p50 / p95, s",
)
COLUMNS_OF_THREE = (*COLUMNS[:4], COLUMNS[5])
BACK = (("nobody comes back", 0.0), ("half come back", 0.5), ("all come back", 1.0))


@dataclass(frozen=True, slots=True)
class Tenant:
    """It asks for its share of the tokens, by weight, in requests of `size` times the mean."""

    name: str = "default"
    weight: float = 1.0
    size: float = 1.0


ONE = (Tenant(),)
THREE = (Tenant("search", 3.0, 0.5), Tenant("chat", 2.0, 1.0), Tenant("batch", 1.0, 2.0))


@dataclass(frozen=True, slots=True)
class Request:
    """Its answer is of `num_answer` tokens, which nobody knows before."""

    tenant: str
    name: str
    num_prompt: int
    max_tokens: int
    num_answer: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.max_tokens


@dataclass(slots=True)
class Results:
    num_in_time: int = 0
    num_refused: int = 0
    num_returned: int = 0
    num_returned_let_in: int = 0
    delays_s: list[float] = field(default_factory=list)
    errors_s: list[float] = field(default_factory=list)
    decisions_s: list[float] = field(default_factory=list)  # of the processor
    tokens: Counter[str] = field(default_factory=Counter)  # let in, by tenant


class Simulation:
    def __init__(
        self,
        requests_per_s: float,
        seconds: float,
        targets: Targets,
        ttft_s: float,
        part_back: float,
        tenants: Sequence[Tenant] = ONE,
    ) -> None:
        """`targets` are what requests ask for; `ttft_s` what is in time, whether they ask for it or not.
        `requests_per_s` are of the mean size: of smaller ones more come."""
        policies = parse_policies(";".join(f"{tenant.name}:weight={tenant.weight}" for tenant in tenants))
        self._admission = Admission(Places(policies, 256), DeficitRounds(policies.weight), RetryAdvice())
        self._slo = SloAdmission(weight_of=policies.weight)
        self._tenants, self._rates = tenants, [tenant.weight / tenant.size for tenant in tenants]
        self._requests_per_s = requests_per_s * sum(self._rates) / sum(tenant.weight for tenant in tenants)
        self._seconds = seconds
        self._targets, self._ttft_s, self._part_back = targets, ttft_s, part_back
        self._draw = random.Random(7)
        self._clock = VirtualClock()
        self._numbers = itertools.count()
        self._free_tokens = POOL_TOKENS
        self._prefill_until, self._num_prefills = 0.0, 0
        self._waiting: dict[int, tuple[Ticket, Request, float, float]] = {}
        self.results = Results()

    @property
    def now(self) -> float:
        return self._clock.now

    def run(self) -> Results:
        self._clock.at(0.0, self._arrive)
        self._clock.run(until=self._seconds)
        return self.results

    def _arrive(self) -> None:
        tenant = self._tenants[0]
        if len(self._tenants) > 1:
            tenant = self._draw.choices(self._tenants, self._rates)[0]
        size = tenant.size * min(self._draw.expovariate(1.0), 8.0)
        max_tokens = max(1, int(MAX_TOKENS * size))
        num_answer = max(1, int(max_tokens * self._draw.uniform(0.2, 1.0)))
        name = f"r{next(self._numbers)}"
        num_prompt = max(1, int(PROMPT_TOKENS * size))
        self._ask(Request(tenant.name, name, num_prompt, max_tokens, num_answer), returned=False)
        self._clock.after(self._draw.expovariate(self._requests_per_s), self._arrive)

    def _ask(self, request: Request, *, returned: bool) -> None:
        tenant, results, predicted = request.tenant, self.results, self._predict(request)
        results.num_returned += returned
        started = time.thread_time()
        try:
            self._slo.check(tenant, request.name, self._targets, predicted, self.now, best_effort=False)
            self._admission.check_room(tenant, self.now, num_tokens=request.num_tokens, request_id=request.name)
        except OverloadedError as error:
            results.num_refused += 1
            results.delays_s.append(error.retry_after_s)
            if self._draw.random() < self._part_back:
                self._clock.after(error.retry_after_s, partial(self._ask, request, returned=True))
            return
        finally:
            results.decisions_s.append(time.thread_time() - started)
        results.num_returned_let_in += returned
        results.tokens[tenant] += request.num_tokens
        self._admission.got_in(tenant, request.name)
        number = next(self._numbers)
        demand = Demand(tenant, request.num_tokens)
        ticket = self._admission.enter(lambda: self._clock.after(0.0, self._try, number), demand, self.now)
        self._waiting[number] = ticket, request, self.now, predicted.ttft_s

    def _predict(self, request: Request) -> Prediction:
        demand, queue_s = Demand(request.tenant, request.num_tokens), max(0.0, self._prefill_until - self.now)
        prefill_s = request.num_prompt / PREFILL_TOKENS_PER_S
        free = self._free_tokens if self._num_prefills < MAX_PREFILLS else 0
        return Prediction(
            self._admission.wait_s(demand, free, self.now),
            Forecast(queue_s + prefill_s, STEP_S, queue_s=queue_s, prefill_s=prefill_s),
            self._admission.tokens_per_s(self.now),
            request.num_tokens,
            request.num_tokens,
        )

    def _try(self, number: int) -> None:
        ticket, request, asked_at, predicted_s = self._waiting[number]
        if request.num_tokens > self._free_tokens or self._num_prefills >= MAX_PREFILLS:
            self._admission.refused(ticket, self.now)
            return
        del self._waiting[number]
        self._free_tokens -= request.num_tokens
        self._num_prefills += 1
        self._prefill_until = max(self._prefill_until, self.now) + request.num_prompt / PREFILL_TOKENS_PER_S
        self._admission.admitted(ticket, self.now)
        ttft_s = self._prefill_until - asked_at
        self.results.num_in_time += ttft_s <= self._ttft_s
        self.results.errors_s.append(abs(ttft_s - predicted_s))
        self._clock.at(self._prefill_until, self._end_prefill)
        self._clock.at(self._prefill_until + request.num_answer * STEP_S, self._end, request)

    def _end_prefill(self) -> None:
        self._num_prefills -= 1
        self._admission.changed()

    def _end(self, request: Request) -> None:
        self._free_tokens += request.num_tokens
        self._admission.changed()


def capacity_per_s() -> float:
    """Requests that the pool serves when it is full. A token is held as long as its request, so with exponential sizes
    the mean over tokens is twice that of the mean request."""
    seconds = PROMPT_TOKENS / PREFILL_TOKENS_PER_S + 0.6 * MAX_TOKENS * STEP_S
    return POOL_TOKENS / (2 * seconds) / (PROMPT_TOKENS + MAX_TOKENS)


def _let_in(results: Results) -> str:
    return f"{results.num_returned_let_in / results.num_returned:.1%}" if results.num_returned else "none"


def row(load: float, name: str, results: Results, per_s: float, seconds: float) -> str:
    errors, delays = sorted(results.errors_s), results.delays_s
    told = f"{median(delays):.1f} / {max(delays):.0f}" if delays else "none"
    return (
        f"| {load:g}x | {name} | {results.num_in_time / seconds / per_s:.1%} "
        f"| {results.num_in_time / max(1, len(errors)):.1%} | {results.num_refused} | {_let_in(results)} | {told} "
        f"| {median(errors):.2f} / {errors[int(0.95 * len(errors))]:.2f} |"
    )


def row_of_three(load: float, name: str, results: Results, per_s: float, seconds: float) -> str:
    shares = ", ".join(f"{100 * results.tokens[one.name] / results.tokens.total():.1f}" for one in THREE)
    return (
        f"| {load:g}x | {name} | {results.num_in_time / seconds / per_s:.1%} "
        f"| {results.num_in_time / max(1, len(results.errors_s)):.1%} | {_let_in(results)} | {shares} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    seconds, per_s, target = 60.0 * options.minutes, capacity_per_s(), Targets(ttft_s=options.ttft)
    decisions: list[float] = []

    def run(load: float, targets: Targets, part_back: float, tenants: Sequence[Tenant]) -> Results:
        results = Simulation(load * per_s, seconds, targets, options.ttft, part_back, tenants).run()
        decisions.extend(results.decisions_s)
        return results

    print(_head(COLUMNS))
    for load in options.load:
        for name, targets, part_back in (("none", NO_TARGETS, 0.0), *((name, target, part) for name, part in BACK)):
            print(row(load, name, run(load, targets, part_back, ONE), per_s, seconds))
    total = sum(one.weight for one in THREE)
    due = ", ".join(f"{one.name} ({100 * one.weight / total:.0f})" for one in THREE)
    print(f"\n{_head((*COLUMNS_OF_THREE, f'% of tokens: {due}'))}")
    for load in options.load:
        for name, part_back in BACK:
            print(row_of_three(load, name, run(load, target, part_back, THREE), per_s, seconds))
    decisions.sort()
    print(
        f"\nfirst token within {options.ttft:g} s; {per_s:.1f} requests a second can be served; {options.minutes:g} "
        f"minutes; decided in {1e6 * median(decisions):.0f} us (p50), "
        f"{1e6 * decisions[int(0.999 * len(decisions))]:.0f} us (p99.9)"
    )
    return 0


def _head(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.slo", description="What early refusal is worth under overload.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of virtual time")
    parser.add_argument("--ttft", type=float, default=5.0, help="target, in seconds")
    parser.add_argument(
        "--load", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.5, 2.0], help="of what can be served"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
