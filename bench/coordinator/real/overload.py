"""Twice what a real cluster can do, of three tenants, each of whom asks for twice its share of tokens; who is refused
comes back exactly when it was told to."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from bench.coordinator.plan import REAL_OVERLOAD, Setting
from bench.coordinator.real.asking import Asked, Goal, OpenLoop, Seen, capacity_per_s, drawn, greedy
from bench.coordinator.real.cluster import PolicyCluster, policy_cluster
from bench.coordinator.real.noting import Line, in_turn
from bench.engine.table import percentile
from bench.handoff.samples import Bar, Samples

FACTOR = 2.0
NUM_DECODE_BLOCKS = 256
MAX_QUEUE = 48
GOAL = Goal(2.0, 0.2)
POLICIES = (("none", ""), (str(GOAL), f",ttft_s={GOAL.ttft_s:g},itl_s={GOAL.itl_s:g}"))
NUM_CLIENTS = 16
GRACE_S = 5.0
LOOK_S = 0.2
REFUSED_P99 = "refused after p99, ms"
LET_IN = "of those who came back as told, let in, %"
QUEUED = "queued, most"


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int] = (8, 24)


TENANTS = (Tenant("chat", 3.0, (32, 96)), Tenant("code", 2.0, (64, 192)), Tenant("documents", 1.0, (128, 384)))
TOTAL = sum(tenant.weight for tenant in TENANTS)


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    asyncio.run(_measure(setting, samples, round_number))


async def _measure(setting: Setting, samples: Samples, round_number: int) -> None:
    effort = setting.effort
    async with policy_cluster(setting, 1, 1, num_decode_blocks=NUM_DECODE_BLOCKS) as cluster:
        async with cluster.serving() as asker:
            capacity = await capacity_per_s(asker, islice(_requests(0), effort.num_to_know), NUM_CLIENTS)
        for policy, terms in in_turn(POLICIES, round_number):
            tenants = ";".join(f"{tenant.name}:weight={tenant.weight:g}{terms}" for tenant in TENANTS)
            options = ("--tenants", f"{tenants};*:weight=0.01", "--max-queue", str(MAX_QUEUE))
            async with cluster.serving(*options) as asker:
                loop, queued = OpenLoop(asker, FACTOR * capacity, back=True), list[float]()
                looking = asyncio.create_task(_look(cluster, queued))
                try:
                    await loop.run(_requests(round_number), effort.overload_s, GRACE_S, seed=round_number)
                finally:
                    looking.cancel()
            line = Line(samples, REAL_OVERLOAD, f"2x, targets {policy}")
            line.add_goodput(loop.seen, GOAL, effort.overload_s)
            line.add(QUEUED, max(queued, default=0.0))
            _note_refusals(loop.seen, line)
            _note_shares(loop.seen, line)


async def _look(cluster: PolicyCluster, queued: list[float]) -> None:
    while True:
        queued.append(await asyncio.to_thread(cluster.coordinator.metric, "kvrelay_requests_waiting"))
        await asyncio.sleep(LOOK_S)


def _note_refusals(seen: list[Seen], line: Line) -> None:
    times_s = [one.took_s for one in seen if one.told_s is not None]
    back = [one for one in seen if one.is_return]
    line.add_share("refused, %", len(times_s), len(seen))
    if times_s:
        line.add("refused after p50, ms", 1e3 * percentile(times_s, 50))
        line.add(REFUSED_P99, 1e3 * percentile(times_s, 99))
    line.add("came back as told", len(back))
    line.add_share(LET_IN, sum(one.told_s is None for one in back), len(back))


def _note_shares(seen: list[Seen], line: Line) -> None:
    """Of those that had their first token, by what they may take at their longest: so they are charged."""
    tokens = Counter[str]()
    for one in seen:
        if one.began:
            tokens[one.asked.tenant] += one.asked.num_tokens
    for tenant in TENANTS:
        column = f"{tenant.name}, % of tokens ({100 * tenant.weight / TOTAL:.0f})"
        line.add_share(column, tokens[tenant.name], tokens.total())


def _requests(seed: int) -> Iterator[Asked]:
    """In an order in which each tenant asks for its share of tokens."""
    draw = random.Random(seed)
    turns = [(0.0, number) for number in range(len(TENANTS))]
    while True:
        so_far, number = heapq.heappop(turns)
        tenant = TENANTS[number]
        prompt = drawn(draw, draw.randint(*tenant.prompt_tokens))
        asked = Asked(prompt, greedy(draw.randint(*tenant.answer_tokens)), tenant.name)
        heapq.heappush(turns, (so_far + asked.num_tokens / tenant.weight, number))
        yield asked


def bars() -> list[Bar]:
    found = []
    for policy, _ in POLICIES:
        line = f"2x, targets {policy}"
        for column, most in ((REFUSED_P99, 50.0), (QUEUED, float(MAX_QUEUE))):
            found.append(Bar(f"{line}: {column}", (REAL_OVERLOAD, line, column), most=most))
        found.append(Bar(f"{line}: {LET_IN}", (REAL_OVERLOAD, line, LET_IN), least=90.0))
    return found


TITLE = (
    "Twice what the cluster can do (real cluster, a prefill and a decode node; three tenants, each asks for twice its "
    f"share; a queue of {MAX_QUEUE}; goodput counts {GOAL})"
)
