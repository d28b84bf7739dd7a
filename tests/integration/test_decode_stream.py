"""Many answers of one caller on one Decode stream: what happens to one, and to all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import grpc
import pytest

from decode_node.answers import Answers
from decode_node.engine import SequenceAdvanced, StepDone
from kvrelay.errors import CancelledError, DeadlineError, InvalidRequestError, NotFoundError, UnavailableError
from kvrelay.messages import AnswersAsked, AnswerWanted, ReservationGranted, TokensDecoded
from kvrelay.pb import decode_pb2, decode_pb2_grpc
from kvrelay.rpc import convert_decode
from kvrelay.rpc.answers import AnswerEvents
from kvrelay.rpc.channel import cancelling, error_from_rpc, open_channel
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.sampling import GeneratedToken
from kvrelay.types import AnswerHandle, FinishReason, ReservationId
from tests.support.decode_harness import Harness, decode_node
from tests.support.fake_engine import make_request
from tests.support.grpc_ends import connected

FIRST, SECOND = AnswerHandle(1), AnswerHandle(2)


async def reserve(harness: Harness, first: int = 10, max_tokens: int = 20) -> ReservationGranted:
    request = make_request(tuple(range(first, first + 10)), max_tokens=max_tokens)
    return await harness.client.reserve(request, 10 + max_tokens, timeout_s=30.0)


async def read_all(events: AnswerEvents) -> list[int]:
    async with asyncio.timeout(60.0), events:
        decoded = [event.tokens async for event in events if isinstance(event, TokensDecoded)]
    return [token.token_id for tokens in decoded for token in tokens]


def wanted(handle: AnswerHandle, granted: ReservationGranted, timeout_s: float = 0.0) -> AnswerWanted:
    return AnswerWanted(handle, granted.reservation_id, compute_tail=True, timeout_s=timeout_s)


@asynccontextmanager
async def stream_to(channel: grpc.aio.Channel) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A Decode stream as it is on the wire."""
    call = decode_pb2_grpc.DecodeStub(channel).Decode()
    async with asyncio.timeout(60.0), cancelling(call):
        yield call


async def ask(call: grpc.aio.StreamStreamCall, *answers: AnswerWanted) -> None:
    await call.write(convert_decode.answers_asked_to_pb(AnswersAsked(answers)))


async def test_the_tokens_of_a_step_are_one_message() -> None:
    async with decode_node() as harness:
        granted = [await reserve(harness, first) for first in (10, 30)]
        async with stream_to(harness.channel) as call:
            pairs = list(zip((FIRST, SECOND), granted, strict=True))
            await ask(call, *(AnswerWanted(handle, one.reservation_id) for handle, one in pairs))
            await until_read(harness, *granted)
            step = [SequenceAdvanced(one.reservation_id, GeneratedToken(20 + handle)) for handle, one in pairs]
            harness.node.deliver(StepDone(tuple(step)))
            reply = cast(decode_pb2.DecodeReply, await call.read())
        assert (list(reply.handles), list(reply.token_ids)) == ([1, 2], [21, 22])


async def test_an_answer_that_cannot_begin_fails_alone() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        unknown = harness.client.decode(ReservationId("none"))
        with pytest.raises(NotFoundError, match=r"^reservation none does not exist or has ended$"):
            await read_all(unknown)
        assert await read_all(harness.client.decode(granted.reservation_id, compute_tail=True)) == list(range(20, 40))


@pytest.mark.parametrize("timeout_s", [-1.0, math.inf, math.nan])
async def test_a_time_limit_that_is_none_fails_one_answer(timeout_s: float) -> None:
    async with decode_node() as harness:
        one, other = await reserve(harness), await reserve(harness, first=30)
        async with stream_to(harness.channel) as call:
            await ask(call, wanted(FIRST, one, timeout_s), AnswerWanted(SECOND, other.reservation_id))
            reply = cast(decode_pb2.DecodeReply, await call.read())
            [(handle, error)] = convert_decode.answers_advanced_from_pb(reply).ended
            assert (handle, type(error)) == (FIRST, InvalidRequestError)
            assert str(error).startswith(f"timeout_s is {timeout_s:g}; allowed is a number of seconds of at least 0")
            assert harness.node.reservations.get(other.reservation_id).decoding
        await harness.client.release(one.reservation_id)


async def test_an_answer_that_is_left_frees_what_it_held_and_the_others_go_on() -> None:
    async with decode_node() as harness:
        left, kept = await reserve(harness), await reserve(harness, first=30)
        leaving = harness.client.decode(left.reservation_id)
        staying = harness.client.decode(kept.reservation_id)
        await until_read(harness, left, kept)
        leaving.cancel()
        async with asyncio.timeout(60.0):
            while left.reservation_id in harness.node.reservations.ids:
                await asyncio.sleep(0.001)
        assert harness.node.reservations.ids == (kept.reservation_id,)
        with pytest.raises(CancelledError):
            await anext(leaving)
        staying.cancel()


async def test_an_answer_that_is_left_before_it_was_asked_for_frees_its_reservation() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        harness.client.decode(granted.reservation_id).cancel()
        assert (await harness.all_free()).free == 32


async def test_the_break_of_a_stream_ends_all_of_its_answers_at_the_node_and_no_other_ones() -> None:
    async with decode_node() as harness, open_channel(harness.address, own_connection=True) as channel:
        granted = [await reserve(harness, first) for first in (10, 30, 50)]
        events = [harness.client.decode(one.reservation_id) for one in granted[:2]]
        other = DecodeClient(channel).decode(granted[2].reservation_id)
        await until_read(harness, *granted)
        await harness.channel.close()
        for one in events:
            with pytest.raises(UnavailableError):
                await anext(one)
        async with asyncio.timeout(60.0):
            while len(harness.node.reservations) > 1:
                await asyncio.sleep(0.001)
        assert harness.node.reservations.ids == (granted[2].reservation_id,)
        other.cancel()


async def test_a_half_closed_stream_is_a_broken_one() -> None:
    """A caller that died looks so."""
    async with decode_node() as harness:
        granted = await reserve(harness)
        async with stream_to(harness.channel) as call:
            await ask(call, AnswerWanted(FIRST, granted.reservation_id))
            await until_read(harness, granted)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        assert (await harness.all_free()).free == 32


async def test_a_handle_that_is_in_use_ends_the_stream() -> None:
    async with decode_node() as harness:
        granted = [await reserve(harness, first) for first in (10, 30)]
        async with stream_to(harness.channel) as call:
            await ask(call, *(AnswerWanted(FIRST, one.reservation_id) for one in granted))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
        assert str(error_from_rpc(refused.value)).startswith("handle 1 is in use")
        await harness.client.release(granted[1].reservation_id)


async def test_the_node_ends_an_answer_whose_time_is_over_though_its_caller_does_not() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        async with stream_to(harness.channel) as call:
            await ask(call, AnswerWanted(FIRST, granted.reservation_id, timeout_s=0.05))
            reply = cast(decode_pb2.DecodeReply, await call.read())
        [(_, error)] = convert_decode.answers_advanced_from_pb(reply).ended
        assert isinstance(error, DeadlineError)
        assert (await harness.all_free()).free == 32


async def test_a_caller_that_takes_nothing_finds_each_answer_whole_later() -> None:
    """What waits for it is no more than the answers themselves, and comes in few messages."""
    async with decode_node() as harness:
        answers = Answers(harness.node)
        granted = [await reserve(harness, first) for first in (10, 30)]
        answers.ask(AnswersAsked((wanted(FIRST, granted[0]), wanted(SECOND, granted[1]))))
        async with asyncio.timeout(60.0):
            while not all(
                harness.node.reservations.get(one.reservation_id).sequence.num_tokens == 30 for one in granted
            ):
                await asyncio.sleep(0.001)
            await harness.node.engine.call(lambda core: None)  # what the last step gave is delivered
            advanced = await answers.next()
        assert advanced is not None
        ids = {handle: [token.token_id for token in tokens] for handle, tokens in advanced.tokens}
        assert ids == {FIRST: list(range(20, 40)), SECOND: list(range(40, 60))}
        assert [handle for handle, _ in advanced.ended] == [FIRST, SECOND]
        answers.leave()


async def test_a_message_has_a_bound_and_the_rest_comes_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.answers.MAX_MESSAGE_VALUES", 3)
    async with decode_node() as harness:
        answers = Answers(harness.node)
        granted = [await reserve(harness, first) for first in (10, 30)]
        for one in granted:
            entry = harness.node.reservations.get(one.reservation_id)
            stream = harness.node._requests[entry.reservation_id].stream
            for token_id in (1, 2):
                stream.push(GeneratedToken(token_id))
        granted_handles = zip((FIRST, SECOND), granted, strict=True)
        answers.ask(AnswersAsked(tuple(AnswerWanted(handle, one.reservation_id) for handle, one in granted_handles)))
        first, second = await answers.next(), await answers.next()
        assert first is not None
        assert second is not None
        one, two = GeneratedToken(1), GeneratedToken(2)
        assert first.tokens == ((FIRST, (one, two)), (SECOND, (one,)))
        assert second.tokens == ((SECOND, (two,)),)
        answers.leave()


async def test_a_closed_stream_tells_what_there_is_and_ends() -> None:
    async with decode_node() as harness:
        answers = Answers(harness.node)
        granted = await reserve(harness)
        answers.ask(AnswersAsked((AnswerWanted(FIRST, granted.reservation_id),)))
        await harness.node.drain(0.0)
        answers.close()
        advanced = await answers.next()
        assert advanced is not None
        [(handle, error)] = advanced.ended
        assert (handle, type(error)) == (FIRST, UnavailableError)
        assert await answers.next() is None


async def test_the_next_answer_after_a_break_comes_on_a_new_stream() -> None:
    async with decode_node() as harness:
        granted = [await reserve(harness, first) for first in (10, 30)]
        broken = harness.client.decode(granted[0].reservation_id)
        harness.client.close()
        with pytest.raises(UnavailableError, match="the decode node is gone"):
            await anext(broken)
        events = harness.client.decode(granted[1].reservation_id, compute_tail=True)
        assert await read_all(events) == list(range(40, 60))
        await harness.client.release(granted[0].reservation_id)


async def test_a_process_that_took_a_nodes_place_knows_none_of_its_reservations() -> None:
    async with decode_node() as before, decode_node() as after:
        granted = await reserve(before)
        with pytest.raises(NotFoundError):
            await read_all(after.client.decode(granted.reservation_id, compute_tail=True))
        await before.client.release(granted.reservation_id)


async def test_a_message_that_makes_no_sense_breaks_the_stream_and_not_the_request() -> None:
    """Its answers are to be resumed on another node."""

    class Senseless(decode_pb2_grpc.DecodeServicer):
        async def Decode(self, requests: object, context: object) -> AsyncIterator[decode_pb2.DecodeReply]:
            yield decode_pb2.DecodeReply(handles=[1], token_ids=[5, 6])

    async with connected(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(Senseless(), server)) as channel:
        with pytest.raises(UnavailableError, match="what it never may: 2 token ids came with 1 handles"):
            await read_all(DecodeClient(channel).decode(ReservationId("res-1")))


@pytest.mark.parametrize("error", [InvalidRequestError("handle 1 is in use"), ValueError("a fault of the node's")])
async def test_a_stream_that_the_node_breaks_off_breaks_no_request(error: Exception) -> None:
    """Whatever the node could not take, it was one message's fault and not that of each answer beside it."""

    class Refusing(decode_pb2_grpc.DecodeServicer):
        async def Decode(self, requests: object, context: object) -> AsyncIterator[decode_pb2.DecodeReply]:
            yield decode_pb2.DecodeReply(handles=[1], token_ids=[5])
            raise error

    async with connected(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(Refusing(), server)) as channel:
        client = DecodeClient(channel)
        answers = [client.decode(ReservationId(name)) for name in ("res-1", "res-2")]
        for answer in answers:
            with pytest.raises(UnavailableError, match=r"^the decode node broke its stream off: "):
                await read_all(answer)


@pytest.mark.parametrize("error", [InvalidRequestError("no more"), ValueError("a fault of ours")])
async def test_what_goes_wrong_with_the_tokens_of_one_answer_is_raised_there(error: Exception) -> None:
    async with decode_node() as harness:
        one, other = await reserve(harness), await reserve(harness, first=30)

        def refuse(tokens: tuple[GeneratedToken, ...]) -> bool:
            raise error

        taken: list[GeneratedToken] = []
        async with (
            asyncio.timeout(60.0),
            harness.client.decode(one.reservation_id, compute_tail=True) as refused,
            harness.client.decode(other.reservation_id, compute_tail=True) as read,
        ):
            with pytest.raises(type(error), match=str(error)):
                await refused.read(refuse)
            finished = await read.read(lambda tokens: taken.extend(tokens) is None)
        assert [token.token_id for token in taken] == list(range(40, 60))
        assert finished is not None
        assert finished.reason is FinishReason.LENGTH


async def test_who_wants_no_more_tokens_ends_the_answer() -> None:
    async with decode_node() as harness:
        granted = await reserve(harness)
        async with asyncio.timeout(60.0):
            events = harness.client.decode(granted.reservation_id, compute_tail=True)
            assert await events.read(lambda tokens: False) is None
            assert (await harness.all_free()).reserved == 0
            with pytest.raises(StopAsyncIteration):
                await anext(events)


async def until_read(harness: Harness, *granted: ReservationGranted) -> None:
    async with asyncio.timeout(60.0):
        while not all(harness.node.reservations.get(one.reservation_id).decoding for one in granted):
            await asyncio.sleep(0.001)
