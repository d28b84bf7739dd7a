"""The typed clients of prefill and decode nodes against real services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvrelay.errors import DeadlineError, NeverFitsError, NotFoundError
from kvrelay.messages import (
    AnswerWanted,
    DecodeFinished,
    HandoffTarget,
    PrefillFinished,
    PrefillStarted,
    ReservationGranted,
    TokensDecoded,
)
from kvrelay.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert_decode, convert_prefill
from kvrelay.rpc.nodes import DecodeClient, PrefillClient
from kvrelay.sampling import GeneratedToken
from kvrelay.types import CachedTokens, FinishReason, InstanceId, ReservationId
from tests.support.answer_generators import AnswerEvents, answers
from tests.support.grpc_ends import connected
from tests.support.messages import EXAMPLE_REQUEST

TARGET = HandoffTarget("127.0.0.1:7420", InstanceId("1f2e"), ReservationId("res-1"), attempt=1, first_block=2)
STARTED = PrefillStarted(CachedTokens(device=16))
FINISHED = PrefillFinished(GeneratedToken(5), CachedTokens(device=16), 0.5, 0.25, 4096)
GRANTED = ReservationGranted(ReservationId("res-1"), InstanceId("1f2e"), 2, 10.0)
DECODED = TokensDecoded((GeneratedToken(5), GeneratedToken(6)))
ENDED = DecodeFinished(FinishReason.LENGTH)


class FakeNode(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Answers with the examples and notes what it was asked; holds every stream until it is told to go on."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.go_on = asyncio.Event()
        self.ended = asyncio.Event()

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.asked.append(convert_prefill.prefill_request_from_pb(request))
        try:
            yield convert_prefill.prefill_event_to_pb(STARTED)
            await self.go_on.wait()
            yield convert_prefill.prefill_event_to_pb(FINISHED)
        finally:
            self.ended.set()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveReply:
        self.asked.append(convert_decode.reserve_request_from_pb(request))
        if request.num_tokens == 1_000_000:
            raise NeverFitsError("62500 blocks wanted, 128 here")
        if request.num_tokens == 1_000:
            await self.go_on.wait()
        return convert_decode.reservation_granted_to_pb(GRANTED)

    async def Renew(self, request: decode_pb2.RenewRequest, context: Any) -> decode_pb2.RenewReply:
        if request.reservation_id != "res-1":
            raise NotFoundError(f"no reservation {request.reservation_id}")
        return decode_pb2.RenewReply(lease_s=9.5)

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Any) -> decode_pb2.ReleaseReply:
        self.asked.append(request.reservation_id)
        return decode_pb2.ReleaseReply()

    async def Decode(self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any) -> AsyncIterator[Any]:
        async with aclosing(answers(requests, self._decode)) as replies:
            async for reply in replies:
                yield reply

    async def _decode(self, wanted: AnswerWanted) -> AnswerEvents:
        self.asked.append((wanted.reservation_id, wanted.compute_tail))
        try:
            yield DECODED
            await self.go_on.wait()
            yield ENDED
        finally:
            self.ended.set()

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def wait_ended(self) -> None:
        async with asyncio.timeout(30.0):
            await self.ended.wait()


async def test_prefill_streams_its_two_events() -> None:
    node = FakeNode()
    node.go_on.set()
    async with (
        connected(node.register) as channel,
        PrefillClient(channel).prefill(EXAMPLE_REQUEST, TARGET) as events,
    ):
        assert [event async for event in events] == [STARTED, FINISHED]

    assert node.asked == [(EXAMPLE_REQUEST, TARGET)]


async def test_prefill_without_a_target() -> None:
    node = FakeNode()
    node.go_on.set()
    async with connected(node.register) as channel, PrefillClient(channel).prefill(EXAMPLE_REQUEST, None) as events:
        assert [event async for event in events] == [STARTED, FINISHED]

    assert node.asked == [(EXAMPLE_REQUEST, None)]


async def test_leaving_a_prefill_cancels_it_on_the_node() -> None:
    node = FakeNode()
    async with connected(node.register) as channel:
        async with PrefillClient(channel).prefill(EXAMPLE_REQUEST, TARGET) as events:
            assert await anext(events) == STARTED
        await node.wait_ended()


async def test_a_prefill_has_the_deadline_it_was_given() -> None:
    node = FakeNode()
    async with connected(node.register) as channel:
        while not node.asked:  # a call may also end before the node has heard of it
            async with PrefillClient(channel).prefill(EXAMPLE_REQUEST, TARGET, timeout_s=1.0) as events:
                with pytest.raises(DeadlineError):
                    [event async for event in events]
        await node.wait_ended()


async def test_reserve_renew_release() -> None:
    node = FakeNode()
    async with connected(node.register) as channel:
        client = DecodeClient(channel)
        assert await client.reserve(EXAMPLE_REQUEST, 7, timeout_s=30, num_tokens_now=6, itl_target_s=0.5) == GRANTED
        assert await client.renew(ReservationId("res-1")) == 9.5
        await client.release(ReservationId("res-1"))
        with pytest.raises(NotFoundError, match="no reservation res-2"):
            await client.renew(ReservationId("res-2"))
        with pytest.raises(NeverFitsError, match="62500 blocks wanted, 128 here"):
            await client.reserve(EXAMPLE_REQUEST, 1_000_000, timeout_s=30)
        while (EXAMPLE_REQUEST, 1_000, 0, 0.0) not in node.asked:  # a call may also end before the node has heard of it
            with pytest.raises(DeadlineError):
                await client.reserve(EXAMPLE_REQUEST, 1_000, timeout_s=1.0)

    assert node.asked == [
        (EXAMPLE_REQUEST, 7, 6, 0.5),
        "res-1",
        (EXAMPLE_REQUEST, 1_000_000, 0, 0.0),
        (EXAMPLE_REQUEST, 1_000, 0, 0.0),
    ]


async def test_decode_streams_tokens_then_the_end() -> None:
    node = FakeNode()
    node.go_on.set()
    async with (
        connected(node.register) as channel,
        DecodeClient(channel).decode(ReservationId("res-1"), compute_tail=True) as events,
    ):
        assert [event async for event in events] == [DECODED, ENDED]

    assert node.asked == [("res-1", True)]


async def test_leaving_a_decode_cancels_it_on_the_node() -> None:
    node = FakeNode()
    async with connected(node.register) as channel:
        async with DecodeClient(channel).decode(ReservationId("res-1")) as events:
            async for event in events:
                assert event == DECODED
                break
        await node.wait_ended()
