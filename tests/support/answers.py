"""Whole answers, and waiting until a real cluster holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.client import AnswerEvent, AsyncClient
from kvrelay.cluster import ClusterStatus
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams
from kvrelay.types import Role

ANSWER_TIMEOUT_S = 120.0
QUIET_TIMEOUT_S = 60.0  # leases, of 10 s at most, included
GREEDY_64 = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str
    finished: RequestFinished


async def ask(
    client: AsyncClient, prompt_ids: Sequence[int], sampling: SamplingParams = GREEDY_64, **cache: Any
) -> Answer:
    """One whole answer; raises what the cluster says went wrong. `cache` is what `generate` takes of caching."""
    prompt = TokenPrompt(tuple(prompt_ids))
    return await collect(client.generate(prompt, sampling, timeout_s=ANSWER_TIMEOUT_S, **cache))


async def collect(events: AsyncIterator[AnswerEvent]) -> Answer:
    token_ids: list[int] = []
    text, finished = "", None
    async for event in events:
        if isinstance(event, TokensGenerated):
            token_ids += [token.token_id for token in event.tokens]
            text += event.text
        elif isinstance(event, RequestFinished):
            finished = event
    assert finished is not None
    return Answer(tuple(token_ids), text, finished)


def holds_nothing(status: ClusterStatus, num_nodes: int) -> bool:
    """Every pool's blocks are free or cached, nothing runs, waits or is reserved, and every node answers."""
    nodes = [report for report in status.nodes if report.info.role in (Role.PREFILL_NODE, Role.DECODE_NODE)]
    return (
        len(nodes) == num_nodes
        and status.num_running == status.num_queued == 0
        and all(
            report.status.ready
            and report.status.blocks.total > 0
            and report.status.blocks.free + report.status.blocks.cached == report.status.blocks.total
            and report.status.num_running == report.status.num_waiting == report.status.num_reservations == 0
            for report in nodes
        )
    )


async def wait_until_quiet(client: AsyncClient, num_nodes: int) -> None:
    """Fails unless the cluster lets go of everything; polls, since what is awaited is another process's state."""
    status: ClusterStatus | None = None
    try:
        async with asyncio.timeout(QUIET_TIMEOUT_S):
            while status is None or not holds_nothing(status, num_nodes):
                await asyncio.sleep(0.05)
                status = await client.status()
    except TimeoutError:
        raise AssertionError(f"still held after {QUIET_TIMEOUT_S} s: {status}") from None
