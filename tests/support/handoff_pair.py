"""A prefill node and a decode node of one model, in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.messages import (
    DecodeFinished,
    HandoffTarget,
    NodeRequest,
    PrefillFinished,
    ReservationGranted,
    TokensDecoded,
)
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import DecodeClient, PrefillClient
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason, InstanceId
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.hosting import hosted

NUM_BLOCKS = 64
TIMEOUT_S = 60.0


@dataclass
class Pair:
    """One prefill node and one decode node."""

    prefill_app: PrefillApp
    decode_app: DecodeApp
    prefill: PrefillClient
    decode: DecodeClient
    decode_address: str
    decode_registry: CollectorRegistry

    async def reserve(self, request: NodeRequest) -> ReservationGranted:
        num_tokens = len(request.token_ids) + (request.sampling.max_tokens or 0)
        return await self.decode.reserve(request, num_tokens, TIMEOUT_S)

    def target(self, granted: ReservationGranted, attempt: int = 1) -> HandoffTarget:
        return HandoffTarget(
            self.decode_address,
            granted.instance_id,
            granted.reservation_id,
            attempt,
            granted.num_cached_blocks,
        )

    async def compute(self, request: NodeRequest, target: HandoffTarget) -> PrefillFinished:
        async with self.prefill.prefill(request, target, timeout_s=TIMEOUT_S) as events:
            finished = [event async for event in events][-1]
        assert isinstance(finished, PrefillFinished)
        return finished

    async def tokens(self, granted: ReservationGranted) -> tuple[list[int], DecodeFinished]:
        token_ids: list[int] = []
        async with self.decode.decode(granted.reservation_id, timeout_s=TIMEOUT_S) as events:
            async for event in events:
                if isinstance(event, DecodeFinished):
                    return token_ids, event
                assert isinstance(event, TokensDecoded)
                token_ids.extend(token.token_id for token in event.tokens)
        raise AssertionError("the stream ended without DecodeFinished")

    async def generated(self, granted: ReservationGranted, *, compute_tail: bool = False) -> list[GeneratedToken]:
        async with self.decode.decode(granted.reservation_id, compute_tail, timeout_s=TIMEOUT_S) as events:
            decoded = [event.tokens async for event in events if isinstance(event, TokensDecoded)]
        return [token for tokens in decoded for token in tokens]

    async def answer(self, request: NodeRequest) -> tuple[list[int], PrefillFinished, ReservationGranted]:
        """As a coordinator would: reserve, then read the tokens while the prompt is computed."""
        granted = await self.reserve(request)
        reading = asyncio.create_task(self.tokens(granted))
        finished = await self.compute(request, self.target(granted))
        token_ids, end = await reading
        assert end.reason is FinishReason.LENGTH
        assert token_ids[0] == finished.first_token.token_id
        return token_ids, finished, granted


@asynccontextmanager
async def pair(
    model: Path, *, decode_settings: Mapping[str, object] | None = None, **prefill_settings: object
) -> AsyncIterator[Pair]:
    """On the way out both pools hold nothing any more."""
    settings = {"model": model, "dtype": "float32", "threads": 1, "num_blocks": NUM_BLOCKS}
    prefill_app = PrefillApp(
        PrefillConfig(**settings, **prefill_settings),  # type: ignore[arg-type]
        InstanceId("prefill"),
        CollectorRegistry(),
    )
    registry = CollectorRegistry()
    decode_app = DecodeApp(
        DecodeConfig(**settings | dict(decode_settings or {})),  # type: ignore[arg-type]
        InstanceId("decode"),
        registry,
    )
    async with AsyncExitStack() as stack:
        decode_address = await stack.enter_async_context(hosted(decode_app))
        prefill_address = await stack.enter_async_context(hosted(prefill_app))
        decode_channel = await stack.enter_async_context(open_channel(decode_address))
        prefill_channel = await stack.enter_async_context(open_channel(prefill_address))
        clients = PrefillClient(prefill_channel), DecodeClient(decode_channel)
        yield Pair(prefill_app, decode_app, *clients, decode_address, registry)
    for app in (prefill_app, decode_app):
        app.host.loaded.pool.check()
        counts = app.host.loaded.pool.counts()
        assert (counts.held, counts.reserved) == (0, 0)
