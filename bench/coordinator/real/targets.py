"""What it is worth to refuse at the door what would miss its targets, on a real cluster, and how good forecasts are.

Nobody comes back. Without targets all wait; goodput counts the same answers in either case, those that came within what
the others ask for.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import islice

from bench.coordinator.plan import REAL_TARGETS, Setting
from bench.coordinator.real.asking import Asked, Goal, OpenLoop, capacity_per_s, closed_loop, drawn, endless, greedy
from bench.coordinator.real.cluster import PolicyCluster, policy_cluster
from bench.coordinator.real.noting import Line, in_turn
from bench.forecast import Buckets, buckets, counts, of_distances
from bench.handoff.samples import Samples

FACTORS = (0.5, 1.0, 2.0)
NUM_DECODE_BLOCKS = 256
PROMPT_TOKENS = (32, 256)
ANSWER_TOKENS = (8, 32)
GOAL = Goal(1.5, 0.2)
POLICIES = (("none", None), (str(GOAL), GOAL))
NUM_CLIENTS = 16
NUM_WARM = 16  # requests by which a new coordinator learns how far its forecasts are off
GRACE_S = GOAL.ttft_s + ANSWER_TOKENS[1] * GOAL.itl_s
ERROR = "kvrelay_prediction_error_seconds"


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    asyncio.run(_measure(setting, samples, round_number))


async def _measure(setting: Setting, samples: Samples, round_number: int) -> None:
    effort = setting.effort
    async with policy_cluster(setting, 1, 1, num_decode_blocks=NUM_DECODE_BLOCKS) as cluster:
        async with cluster.serving() as asker:
            capacity = await capacity_per_s(asker, islice(_requests(round_number), effort.num_to_know), NUM_CLIENTS)
        for factor in FACTORS:
            for policy, goal in in_turn(POLICIES, round_number):
                async with cluster.serving() as asker:
                    await closed_loop(asker, islice(_requests(0), NUM_WARM), NUM_WARM // 4)
                    loop, before = OpenLoop(asker, factor * capacity), await _errors(cluster)
                    await loop.run(_requests(round_number, goal), effort.load_s, GRACE_S, seed=round_number)
                    after = await _errors(cluster)
                line = Line(samples, REAL_TARGETS, f"{factor:g}x, targets {policy}")
                line.add("asked for /s", len(loop.seen) / effort.load_s)
                line.add_goodput(loop.seen, GOAL, effort.load_s)
                line.add_share("refused, %", sum(seen.told_s is not None for seen in loop.seen), len(loop.seen))
                line.add_first_tokens(loop.seen)
                for part in (0.5, 0.95):
                    error_s = of_distances(counts(before, after), 0.0, part)
                    line.add(f"error of TTFT foretold p{100 * part:g}, s", error_s)


async def _errors(cluster: PolicyCluster) -> Buckets:
    return await asyncio.to_thread(buckets, cluster.coordinator, ERROR, "ttft")


def _requests(round_number: int, goal: Goal | None = None) -> Iterator[Asked]:
    """The same of the same round."""
    draw = random.Random(round_number)

    def make(number: int) -> Asked:
        prompt = drawn(draw, draw.randint(*PROMPT_TOKENS))
        return Asked(prompt, greedy(draw.randint(*ANSWER_TOKENS)), goal=goal)

    return endless(make)


TITLE = (
    "Targets (real cluster, a prefill and a decode node; all want the same, nobody comes back; 1x is what the cluster "
    f"can do; goodput counts {GOAL})"
)
