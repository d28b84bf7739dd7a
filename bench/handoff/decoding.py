"""A decode loop inside a process, and its speed: sequences that run whether or not anybody reads them by gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench.handoff.receiving import Received
from kvrelay.messages import DecodeFinished, NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import RequestId, ReservationId

BATCH = 8
PROMPT_TOKENS = 256
NUM_WARM_UP_STEPS = 8
NUM_AHEAD_STEPS = 32  # the first sequence may be so far ahead of the last, which joins later
TIMEOUT_S = 120.0
_ids = itertools.count(1)


async def steps_per_s(received: Received, num_steps: int) -> float:
    """Of a batch of BATCH sequences, whose contexts are the same each time: the prompts' KV is what lies there."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        _running(received, NUM_WARM_UP_STEPS + num_steps + NUM_AHEAD_STEPS) as reservation_ids,
    ):
        received.core.steps.clear()
        async with asyncio.TaskGroup() as readers:
            for reservation_id in reservation_ids:
                readers.create_task(_read(received, reservation_id))
        return speed(received.core.steps, BATCH, num_steps)


def speed(steps: Sequence[tuple[float, int]], batch: int, num_steps: int) -> float:
    """Of `num_steps` full ones, after those that warm up; each is when it ended and of how many sequences it was.

    Raises ValueError if there are too few.
    """
    full = [ended_at for ended_at, num_rows in steps if num_rows == batch]
    ends = full[NUM_WARM_UP_STEPS : NUM_WARM_UP_STEPS + num_steps + 1]
    if len(ends) <= num_steps:
        raise ValueError(f"{len(full)} of {len(steps)} steps gave all {batch} sequences a token; too few to count")
    return num_steps / (ends[-1] - ends[0])


@asynccontextmanager
async def _running(received: Received, num_tokens: int) -> AsyncIterator[list[ReservationId]]:
    node = received.node
    async with AsyncExitStack() as ending:
        reservation_ids = []
        for _ in range(BATCH):
            request = _request(next(_ids), num_tokens)
            granted = await node.reserve(request, PROMPT_TOKENS + num_tokens)
            ending.callback(node.end, granted.reservation_id, AssertionError("the measurement is over"))
            node.begin_receive(granted.reservation_id, 1)
            await node.begin_commit(granted.reservation_id, 1, GeneratedToken(3))
            reservation_ids.append(granted.reservation_id)
        yield reservation_ids


async def _read(received: Received, reservation_id: ReservationId) -> None:
    """To the answer's end; the sequence runs from here on."""
    with received.node.decoding(reservation_id, compute_tail=False) as stream:
        while not isinstance(await stream.next(), DecodeFinished):
            pass


def _request(number: int, num_tokens: int) -> NodeRequest:
    token_ids = tuple(3 + (number * 7919 + i) % 4_000 for i in range(PROMPT_TOKENS))
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True)
    return NodeRequest(RequestId(f"decoding-{number}"), token_ids, PROMPT_TOKENS, sampling)
