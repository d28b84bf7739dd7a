"""A call that is left ends on the server soon, by whatever way it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvrelay.errors import CancelledError, DeadlineError, UnavailableError
from kvrelay.rpc import raw
from kvrelay.rpc.calls import Replies, answer
from kvrelay.rpc.channel import cancelling
from tests.support.grpc_ends import connected

SERVICE = "kvrelay.pb.Endless"


class Endless:
    """Streams without end; `ended` is set by the handler's own clean-up."""

    def __init__(self, payload: bytes = b"x") -> None:
        self.payload = payload
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    async def send(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            self.started.set()
            while True:
                yield self.payload
                if request == b"wait":
                    await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        try:
            self.started.set()
            await asyncio.Event().wait()
            return b""
        finally:
            self.ended.set()

    def register(self, server: grpc.aio.Server) -> None:
        methods = raw.raw_methods(SERVICE, unary_stream={"Send": self.send}, stream_unary={"Collect": self.collect})
        server.add_generic_rpc_handlers((methods,))

    async def wait_ended(self) -> None:
        async with asyncio.timeout(30.0):
            await self.ended.wait()


def send(channel: grpc.aio.Channel, request: bytes) -> Any:
    return raw.unary_stream(channel, SERVICE, "Send")(request)


@pytest.mark.parametrize("request_", [b"wait", b"flood"])
async def test_break_inside_cancelling_ends_the_call(request_: bytes) -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        async with cancelling(send(channel, request_)) as call:
            async for _ in call:
                break
        await endless.wait_ended()
        assert call.cancelled()


async def test_an_exception_inside_cancelling_ends_the_call_and_passes() -> None:
    endless = Endless()

    async def read(channel: grpc.aio.Channel) -> None:
        async with cancelling(send(channel, b"wait")) as call:
            async for _ in call:
                raise ZeroDivisionError

    async with connected(endless.register) as channel:
        with pytest.raises(ZeroDivisionError):
            await read(channel)
        await endless.wait_ended()


async def test_cancelling_the_task_inside_cancelling_ends_the_call() -> None:
    endless = Endless()

    async def read(channel: grpc.aio.Channel) -> None:
        async with cancelling(send(channel, b"wait")) as call:
            async for _ in call:
                pass

    async with connected(endless.register) as channel:
        task = asyncio.create_task(read(channel))
        await endless.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await endless.wait_ended()


async def test_break_out_of_replies_ends_the_call_though_they_are_still_referenced() -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        async with Replies(send(channel, b"wait"), bytes) as replies:
            async for message in replies:
                assert message == b"x"
                break
        await endless.wait_ended()


async def test_replies_that_are_dropped_end_the_call() -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        async for _ in Replies(send(channel, b"wait"), bytes):
            break
        await endless.wait_ended()


async def test_a_sender_blocked_by_flow_control_ends_too() -> None:
    endless = Endless(payload=bytes(2**20))
    async with connected(endless.register) as channel:
        async with Replies(send(channel, b"flood"), len) as replies:
            async for num_bytes in replies:
                assert num_bytes == 1_048_576
                break
        await endless.wait_ended()


async def test_another_task_may_cancel_replies_and_their_reader_learns_it() -> None:
    endless = Endless()
    async with connected(endless.register) as channel, Replies(send(channel, b"wait"), bytes) as replies:
        asyncio.get_running_loop().call_soon(replies.cancel)
        with pytest.raises(CancelledError, match="cancelled on this side"):
            async for _ in replies:
                pass


async def test_the_readers_own_cancellation_stays_one() -> None:
    endless = Endless()

    async def read(channel: grpc.aio.Channel) -> None:
        async with Replies(send(channel, b"wait"), bytes) as replies:
            async for _ in replies:
                pass

    async with connected(endless.register) as channel:
        task = asyncio.create_task(read(channel))
        await endless.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await endless.wait_ended()


async def test_a_timeout_around_an_answer_ends_the_call_and_stays_a_timeout() -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await answer(raw.stream_unary(channel, SERVICE, "Collect")(_nothing()), bytes)
        await endless.wait_ended()


async def test_a_deadline_ends_the_call_on_both_sides() -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        with pytest.raises(DeadlineError):
            await answer(raw.stream_unary(channel, SERVICE, "Collect")(_nothing(), timeout=1.0), bytes)
        await endless.wait_ended()


async def test_a_server_that_stops_makes_its_streams_unavailable() -> None:
    endless = Endless()
    async with connected(endless.register) as channel:
        replies = Replies(send(channel, b"wait"), bytes)
        await anext(replies)
        reading = asyncio.ensure_future(anext(replies))
    with pytest.raises((UnavailableError, CancelledError)):
        await reading
    await endless.wait_ended()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
