"""Where the turns of conversations go, on a real cluster: by cost, or by load less what is cached.

Each client has one conversation after another; each turn's prompt is all that was said before and some tokens more. In
turn and by prefix alone are compared in virtual time: the coordinator has no such settings.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from bench.coordinator.plan import REAL_PLACEMENT, Conversations, Setting
from bench.coordinator.real.asking import Asked, Asker, Seen, drawn, greedy
from bench.coordinator.real.cluster import policy_cluster
from bench.coordinator.real.noting import Line, in_turn
from bench.handoff.samples import Samples

NUM_PREFILL, NUM_DECODE = 2, 2
NUM_DECODE_BLOCKS = 1_024
POLICIES = ("load", "cost")
FIRST_TOKENS = (128, 384)  # of a conversation's first prompt
MORE_TOKENS = (32, 96)  # of what a client says next
ANSWER_TOKENS = 16
THINK_S = 0.5  # mean, before the next turn
NUM_WARM = 8  # requests that nodes measure themselves by


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    asyncio.run(_measure(setting, samples, round_number))


async def _measure(setting: Setting, samples: Samples, round_number: int) -> None:
    load = setting.effort.conversations
    async with policy_cluster(setting, NUM_PREFILL, NUM_DECODE, num_decode_blocks=NUM_DECODE_BLOCKS) as cluster:
        for policy in in_turn(POLICIES, round_number):
            draw = random.Random(round_number)
            async with cluster.serving("--placement", policy) as asker:
                await asyncio.gather(*(_conversation(asker, draw.getrandbits(32), 1) for _ in range(NUM_WARM)))
                clients = (_client(asker, draw.getrandbits(32), load) for _ in range(load.num_clients))
                seen = [one for each in await asyncio.gather(*clients) for one in each]
            _note(seen, Line(samples, REAL_PLACEMENT, f"--placement {policy}"))


async def _client(asker: Asker, seed: int, load: Conversations) -> list[Seen]:
    draw = random.Random(seed)
    seen = []
    for _ in range(load.num_each):
        seen += await _conversation(asker, draw.getrandbits(32), load.num_turns)
    return seen


async def _conversation(asker: Asker, seed: int, num_turns: int) -> list[Seen]:
    draw = random.Random(seed)
    said, seen = drawn(draw, draw.randint(*FIRST_TOKENS)), list[Seen]()
    for _ in range(num_turns):
        seen.append(await asker.ask(Asked(said, greedy(ANSWER_TOKENS))))
        answer = tuple(token.token_id for token in seen[-1].answer.tokens)
        said = (*said, *answer, *drawn(draw, draw.randint(*MORE_TOKENS)))
        await asyncio.sleep(draw.expovariate(1 / THINK_S))
    return seen


def _note(seen: list[Seen], line: Line) -> None:
    """Work is the prompt tokens that a node computed."""
    ends = [one.answer.finished for one in seen if one.answer.finished is not None]
    num_cached = sum(end.usage.cached.total for end in ends)
    work = Counter[str]()
    for end in ends:
        work[end.prefill_node] += end.usage.prompt_tokens - end.usage.cached.total
    num_on_decode = work.pop("", 0)
    line.add_share("hit rate, %", num_cached, sum(end.usage.prompt_tokens for end in ends))
    line.add_first_tokens(seen)
    if work:
        line.add("most / mean work", NUM_PREFILL * max(work.values()) / work.total())
    line.add_share("computed on decode nodes, %", num_on_decode, num_on_decode + work.total())


TITLE = (
    f"Placement (real cluster, {NUM_PREFILL} prefill and {NUM_DECODE} decode nodes; conversations; a hit is a prompt "
    "token found cached, work is prompt tokens computed by a prefill node)"
)
