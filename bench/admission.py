"""Whose turn it is under overload: python -m bench.admission

Runs the coordinator's own admission code (turns, bounds, advice to those turned away) in virtual time, against a pool
of KV memory that stands for the cluster: an answer holds what it asked for from its turn until it has been computed.
Who is turned away comes back exactly when it was told to. It reads no clock but to time the code itself, so all other
numbers are the same on any machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

from bench.sim.clock import VirtualClock
from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.retry_advice import RetryAdvice
from coordinator.tenant_policy import parse_policies
from kvrelay.errors import OverloadedError

POOL_TOKENS = 200_000
PREFILL_TOKENS_PER_S = 8_000
STEP_S = 0.02  # a token of an answer
MAX_WAIT_S = 60.0


COLUMNS = (
    "tenant",
    "weight",
    "of tokens served",
    "queued mean / max",
    "wait p50 / max, s",
    "gave up",
    "turned away",
    "told p50 / max, s",
    "of those who came back, let in",
)


@dataclass(frozen=True, slots=True)
class Load:
    """One tenant's mean sizes: exponential, cut at eight times the mean. Answers are as long as they may be."""

    name: str
    weight: float
    prompt_tokens: int
    max_tokens: int


LOADS = (Load("search", 3.0, 200, 100), Load("chat", 2.0, 1_000, 300), Load("batch", 1.0, 6_000, 800))


@dataclass(slots=True)
class Results:
    """Of one tenant."""

    num_asked: int = 0
    num_accepted: int = 0
    num_gave_up: int = 0  # waited for MAX_WAIT_S
    tokens_served: int = 0
    waits_s: list[float] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)  # places taken, once a second
    delays_s: list[float] = field(default_factory=list)  # told to those turned away
    num_returned: int = 0
    num_returned_accepted: int = 0


class Simulation:
    def __init__(self, loads: Sequence[Load], tokens_per_s: dict[str, float], seconds: float, max_queue: int) -> None:
        policies = parse_policies(";".join(f"{load.name}:weight={load.weight}" for load in loads) + ";*:weight=0.01")
        self._places = Places(policies, max_queue)
        self._admission = Admission(self._places, DeficitRounds(policies.weight), RetryAdvice())
        self._loads = {load.name: load for load in loads}
        self._tokens_per_s = tokens_per_s
        self._seconds = seconds
        self._draw = random.Random(7)
        self._clock = VirtualClock()
        self._numbers = itertools.count()
        self._free_tokens = POOL_TOKENS
        self._tickets: dict[int, Ticket] = {}
        self.pool_used: list[float] = []
        self.results: defaultdict[str, Results] = defaultdict(Results)
        self.decisions_s: list[float] = []  # of the processor, until a request knew whether it was let in

    @property
    def now(self) -> float:
        return self._clock.now

    def run(self) -> None:
        for load in self._loads.values():
            self._clock.at(self._draw.expovariate(1.0), self._arrive, load)
        self._clock.at(0.0, self._look)
        self._clock.run(until=self._seconds)

    def _look(self) -> None:
        self.pool_used.append(1 - self._free_tokens / POOL_TOKENS)
        for name in self._loads:
            self.results[name].queue.append(self._places.taken(name).num_places)
        self._clock.after(1.0, self._look)

    def _arrive(self, load: Load) -> None:
        size = min(self._draw.expovariate(1.0), 8.0)
        sized = Load(
            load.name, load.weight, max(1, int(load.prompt_tokens * size)), max(1, int(load.max_tokens * size))
        )
        self._ask(sized, f"r{next(self._numbers)}", returned=False)
        mean_tokens = load.prompt_tokens + load.max_tokens
        pause_s = self._draw.expovariate(self._tokens_per_s[load.name] / mean_tokens)
        self._clock.after(pause_s, self._arrive, load)

    def _ask(self, load: Load, request_id: str, *, returned: bool) -> None:
        results, num_tokens = self.results[load.name], load.prompt_tokens + load.max_tokens
        results.num_asked += 1
        results.num_returned += returned
        started = time.thread_time()
        try:
            self._admission.check_room(load.name, self.now, num_tokens=num_tokens, request_id=request_id)
        except OverloadedError as error:
            results.delays_s.append(error.retry_after_s)
            self._clock.after(error.retry_after_s, partial(self._ask, load, request_id, returned=True))
            return
        finally:
            self.decisions_s.append(time.thread_time() - started)
        results.num_accepted += 1
        results.num_returned_accepted += returned
        self._admission.got_in(load.name, request_id)
        number, entered_at = next(self._numbers), self.now

        def may_try() -> None:
            self._clock.after(0.0, self._try, number, load, entered_at)

        demand = Demand(load.name, num_tokens)
        self._tickets[number] = self._admission.enter(may_try, demand, self.now)
        self._clock.after(MAX_WAIT_S, self._give_up, number, load)

    def _try(self, number: int, load: Load, entered_at: float) -> None:
        ticket, num_tokens = self._tickets[number], load.prompt_tokens + load.max_tokens
        if not ticket.trying:
            return  # it gave up
        if num_tokens > self._free_tokens:
            self._admission.refused(ticket, self.now)
            return
        self._free_tokens -= num_tokens
        results = self.results[load.name]
        results.tokens_served += num_tokens
        results.waits_s.append(self.now - entered_at)
        self._admission.admitted(ticket, self.now)
        self._clock.after(seconds_held(load), self._end, num_tokens)

    def _end(self, num_tokens: int) -> None:
        self._free_tokens += num_tokens
        self._admission.changed()

    def _give_up(self, number: int, load: Load) -> None:
        num_before = self._admission.num_waiting
        self._admission.leave(self._tickets.pop(number), self.now)
        self.results[load.name].num_gave_up += num_before - self._admission.num_waiting


def seconds_held(load: Load) -> float:
    return load.prompt_tokens / PREFILL_TOKENS_PER_S + load.max_tokens * STEP_S


def capacity_tokens_per_s(loads: Sequence[Load]) -> float:
    """Of the pool when it is full of tenants at their shares. A token is held as long as its request; with exponential
    sizes the mean over tokens is twice that of the mean request."""
    total = sum(load.weight for load in loads)
    return POOL_TOKENS / sum(load.weight / total * 2 * seconds_held(load) for load in loads)


def offered(loads: Sequence[Load], overload: float, flooding: str = "") -> dict[str, float]:
    """Tokens a second by tenant: everyone `overload` times its share, or the flooding one so many times over the whole
    capacity while the others ask for nine tenths of their shares."""
    capacity, total = capacity_tokens_per_s(loads), sum(load.weight for load in loads)
    if not flooding:
        return {load.name: overload * capacity * load.weight / total for load in loads}
    return {
        load.name: overload * capacity if load.name == flooding else 0.9 * capacity * load.weight / total
        for load in loads
    }


def report(simulation: Simulation, loads: Sequence[Load]) -> None:
    served = Counter({name: results.tokens_served for name, results in simulation.results.items()})
    total, weights = served.total(), sum(load.weight for load in loads)
    for load in loads:
        one = simulation.results[load.name]
        returned = one.num_returned_accepted / one.num_returned if one.num_returned else 0.0
        print(
            f"| {load.name} | {load.weight / weights:.1%} | {served[load.name] / total:.1%} "
            f"| {mean(one.queue):.0f} / {max(one.queue)} | {median(one.waits_s):.1f} / {max(one.waits_s):.1f} "
            f"| {one.num_gave_up} | {len(one.delays_s)} | {_delays(one.delays_s)} "
            f"| {f'{returned:.1%}' if one.num_returned else 'none'} |"
        )
    decisions = sorted(simulation.decisions_s)
    late = simulation.pool_used[len(simulation.pool_used) // 10 :]
    print(
        f"\npool used {mean(late):.1%} after the first tenth; {len(decisions)} times asked, decided in "
        f"{1e6 * median(decisions):.0f} us (p50), {1e6 * decisions[int(0.999 * len(decisions))]:.0f} us (p99.9)\n"
    )


def _delays(delays_s: list[float]) -> str:
    return f"{median(delays_s):.0f} / {max(delays_s):.0f}" if delays_s else "none"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    scenarios = [(f"everyone at {factor:g}x of its share", offered(LOADS, factor)) for factor in options.overload]
    scenarios.append(("batch floods with 2x of everything, the others at 0.9x", offered(LOADS, 2.0, "batch")))
    for title, tokens_per_s in scenarios:
        simulation = Simulation(LOADS, tokens_per_s, 60.0 * options.minutes, options.max_queue)
        simulation.run()
        print(f"**{title}**, {options.minutes:g} minutes\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        report(simulation, LOADS)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.admission", description="Whose turn it is under overload.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of virtual time")
    parser.add_argument("--max-queue", type=int, default=256, help="answers that may wait")
    parser.add_argument("--overload", type=float, nargs="+", default=[1.0, 2.0], help="of what the pool can take")
    return parser


if __name__ == "__main__":
    sys.exit(main())
