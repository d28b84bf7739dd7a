"""How much to set aside for an answer, on a real cluster: all of max_tokens, or what answers usually take.

Answers are drawn, and end where they first have one of a few letters: nobody knows beforehand where, most of them long
before max_tokens, and one of the same seed is the same under either policy.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import islice

from bench.coordinator.plan import REAL_RESERVATIONS, Setting
from bench.coordinator.real.asking import Asked, Goal, OpenLoop, capacity_per_s, closed_loop, drawn, endless
from bench.coordinator.real.cluster import PolicyCluster, policy_cluster
from bench.coordinator.real.noting import Line, in_turn
from bench.handoff.samples import Samples
from kvrelay.sampling import SamplingParams

POLICIES = ("full", "expected")
FACTORS = (1.0, 2.0)  # of what `full` can do
NUM_DECODE_BLOCKS = 72  # 1,152 tokens: six answers at their longest
PROMPT_TOKENS = (32, 64)
MAX_TOKENS = 128
LETTERS = ("k", "K", "v", "V", "j", "J", "z", "Z")
GOAL = Goal(2.0, 0.2)
NUM_CLIENTS = 12
NUM_LEARNED = 24  # answers before it is measured: of fewer than 20 nothing is expected
GRACE_S = GOAL.ttft_s + MAX_TOKENS * GOAL.itl_s / 2


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    asyncio.run(_measure(setting, samples, round_number))


async def _measure(setting: Setting, samples: Samples, round_number: int) -> None:
    effort = setting.effort
    async with policy_cluster(setting, 1, 1, num_decode_blocks=NUM_DECODE_BLOCKS) as cluster:
        async with cluster.serving("--reserve", "full") as asker:
            capacity = await capacity_per_s(asker, islice(_requests(round_number), effort.num_to_know), NUM_CLIENTS)
        for factor in FACTORS:
            for policy in in_turn(POLICIES, round_number):
                async with cluster.serving("--reserve", policy) as asker:
                    await closed_loop(asker, islice(_requests(0), NUM_LEARNED), NUM_CLIENTS)
                    loop, before = OpenLoop(asker, factor * capacity), await _num_preempted(cluster)
                    await loop.run(_requests(round_number), effort.load_s, GRACE_S, seed=round_number)
                    num_preempted = await _num_preempted(cluster) - before
                line = Line(samples, REAL_RESERVATIONS, f"{factor:g}x, --reserve {policy}")
                line.add("asked for /s", len(loop.seen) / effort.load_s)
                line.add_goodput(loop.seen, GOAL, effort.load_s)
                line.add_first_tokens(loop.seen)
                num_finished = sum(seen.finished for seen in loop.seen)
                line.add_share("answered, %", num_finished, len(loop.seen))
                line.add_share("preemptions, % of answers", num_preempted, num_finished)


async def _num_preempted(cluster: PolicyCluster) -> float:
    return await asyncio.to_thread(cluster.decode[0].metric, "kvrelay_preemptions_total")


def _requests(round_number: int) -> Iterator[Asked]:
    draw = random.Random(round_number)

    def make(number: int) -> Asked:
        sampling = SamplingParams(seed=1_000 * round_number + number, max_tokens=MAX_TOKENS, stop=LETTERS)
        return Asked(drawn(draw, draw.randint(*PROMPT_TOKENS)), sampling)

    return endless(make)


TITLE = (
    f"Reservations (real cluster, a prefill and a decode node of {16 * NUM_DECODE_BLOCKS:,} tokens of KV; max_tokens "
    f"{MAX_TOKENS}; 1x is what `full` can do; goodput counts {GOAL})"
)
