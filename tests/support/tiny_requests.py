"""Requests to a cluster of the tiny model, and what one engine alone answers to them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress

from kvrelay.client import AsyncClient
from kvrelay.errors import KVRelayError, UnavailableError
from kvrelay.messages import NodeRequest
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId
from tests.support.answers import Answer, ask
from tests.support.byte_tokenizer import SPECIAL_TOKENS, VOCAB_SIZE
from tests.support.reference import ReferenceEngine

POLL_S = 0.01


def random_prompt(num_tokens: int, seed: int) -> tuple[int, ...]:
    """Any bytes, no special token."""
    draw = random.Random(seed)
    return tuple(draw.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(num_tokens))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)


def expected(
    reference: ReferenceEngine, prompt_ids: tuple[int, ...], sampling: SamplingParams | int
) -> tuple[int, ...]:
    """Token ids of an engine that answers alone; an int is greedy for so many tokens."""
    settled = greedy(sampling) if isinstance(sampling, int) else sampling
    return tuple(reference.answer(NodeRequest(RequestId("reference"), prompt_ids, len(prompt_ids), settled)))


async def ask_and_leave(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int, after_s: float) -> None:
    """A client that goes away after so long, whatever it has by then."""
    asking = asyncio.create_task(ask(client, prompt_ids, greedy(max_tokens)))
    await asyncio.wait({asking}, timeout=after_s)
    await leave(asking)


async def leave(*asking: asyncio.Task[Answer]) -> None:
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def ask_until_served(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> Answer:
    """Asks again for as long as the cluster says that it is not there; whoever calls bounds it."""
    while True:
        with suppress(UnavailableError):
            return await ask(client, prompt_ids, greedy(max_tokens))
        await asyncio.sleep(0.1)


async def answer_or_error(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> Answer | KVRelayError:
    try:
        return await ask(client, prompt_ids, greedy(max_tokens))
    except KVRelayError as error:
        return error


async def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until it holds; for other processes' state, which can only be polled (in a thread: it may block)."""
    started = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started
