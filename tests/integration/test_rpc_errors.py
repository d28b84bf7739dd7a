"""What a handler raises, its caller gets: every class of the tree, on every kind of method."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvrelay import errors
from kvrelay.errors import InvalidRequestError, KVRelayError, NotFoundError, UnavailableError
from kvrelay.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import raw
from kvrelay.rpc.calls import Replies, answer
from kvrelay.rpc.channel import error_from_rpc, open_channel
from tests.support.cluster import free_port
from tests.support.grpc_ends import connected, serving

ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVRelayError)]
KINDS = ("unary", "stream", "raw stream-stream", "raw unary-stream", "raw stream-unary", "writing stream")
SERVICE = "kvrelay.pb.Raising"


class Raising(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """Each method raises `error`; those that stream do so after a first reply."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveReply:
        raise self.error

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent()
        raise self.error

    async def exchange(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message
            raise self.error

    async def send(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise self.error

    async def write(self, request: bytes, context: Any) -> None:
        await context.write(b"first")
        raise self.error

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            raise self.error
        return b""

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        methods = raw.raw_methods(
            SERVICE,
            stream_stream={"Exchange": self.exchange},
            unary_stream={"Send": self.send, "Write": self.write},  # type: ignore[dict-item]
            stream_unary={"Collect": self.collect},
        )
        server.add_generic_rpc_handlers((methods,))


async def one_message() -> AsyncIterator[bytes]:
    yield b"message"


async def call(channel: grpc.aio.Channel, kind: str) -> None:
    """Calls the method of that kind to its end; a stream's error has to come after its first reply."""
    if kind == "unary":
        await answer(decode_pb2_grpc.DecodeStub(channel).Reserve(decode_pb2.ReserveRequest()), lambda reply: reply)
    elif kind == "raw stream-unary":
        await answer(raw.stream_unary(channel, SERVICE, "Collect")(one_message()), bytes)
    else:
        calls = {
            "stream": lambda: prefill_pb2_grpc.PrefillStub(channel).Prefill(prefill_pb2.PrefillRequest()),
            "raw stream-stream": lambda: raw.stream_stream(channel, SERVICE, "Exchange")(one_message()),
            "raw unary-stream": lambda: raw.unary_stream(channel, SERVICE, "Send")(b""),
            "writing stream": lambda: raw.unary_stream(channel, SERVICE, "Write")(b""),
        }
        num_replies = 0
        try:
            async with Replies(calls[kind](), lambda message: message) as replies:
                async for _ in replies:
                    num_replies += 1
        finally:
            assert num_replies == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error_class", ERRORS)
async def test_each_error_comes_back_as_it_was_raised(error_class: type[KVRelayError], kind: str) -> None:
    counted: list[str] = []
    error = error_class("ünlike: 3 of 2 blocks", retry_after_s=0.25)
    async with connected(Raising(error).register, on_error=lambda method, code: counted.append(code)) as channel:
        with pytest.raises(KVRelayError) as caught:
            await call(channel, kind)

    assert type(caught.value) is error_class
    assert caught.value.message == "ünlike: 3 of 2 blocks"
    assert caught.value.retry_after_s == 0.25
    assert counted == [error_class.code]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_is_counted_as_open_until_it_is_over(kind: str) -> None:
    changes: list[int] = []
    raising = Raising(NotFoundError("why"))
    async with serving(raising.register, on_open=lambda method, change: changes.append(change)) as port:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(NotFoundError):
                await call(channel, kind)
        async with asyncio.timeout(30.0):
            while changes != [1, -1]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("error_class", ERRORS)
async def test_each_error_has_its_grpc_status(error_class: type[KVRelayError]) -> None:
    async with connected(Raising(error_class("why")).register) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode_pb2_grpc.DecodeStub(channel).Reserve(decode_pb2.ReserveRequest())

    assert caught.value.code().name == error_class.status.value
    assert caught.value.details() == "why"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_is_internal_and_keeps_its_traceback_to_the_log(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[str] = []
    raising = Raising(ValueError("secret of the server"))
    async with connected(raising.register, on_error=lambda method, code: counted.append(code)) as channel:
        with pytest.raises(KVRelayError) as caught:
            await call(channel, kind)

    assert type(caught.value) is KVRelayError
    assert caught.value.message.endswith(" failed; the server's log says why")
    assert "secret" not in repr(caught.value) + repr(caught.value.__cause__)
    assert "Traceback" not in repr(caught.value.__cause__)
    assert counted == ["internal"]
    (record,) = (record for record in caplog.records if record.name == "kvrelay.rpc.interceptor")
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    assert "secret of the server" in caplog.text


async def test_long_messages_are_cut_to_what_headers_hold() -> None:
    async with connected(Raising(InvalidRequestError("ß" * 5_000)).register) as channel:
        with pytest.raises(InvalidRequestError) as caught:
            await call(channel, "unary")

    assert caught.value.message == "ß" * 498 + "..."


async def test_a_handler_may_abort_by_itself() -> None:
    async def abort(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    methods = raw.raw_methods(SERVICE, unary_stream={"Send": abort})
    async with connected(lambda server: server.add_generic_rpc_handlers((methods,))) as channel:
        with pytest.raises(NotFoundError, match="no such thing"):
            await call(channel, "raw unary-stream")


async def test_an_unknown_method_is_an_error_that_is_not_retried() -> None:
    async with connected() as channel:
        with pytest.raises(KVRelayError, match="knows no such call: it plays another role") as caught:
            await call(channel, "unary")

    assert not caught.value.retryable


async def test_a_message_over_the_limit_is_an_invalid_request_and_no_overload() -> None:
    async def send(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""
        yield bytes(5 * 2**20)

    methods = raw.raw_methods(SERVICE, unary_stream={"Send": send})
    async with serving(lambda server: server.add_generic_rpc_handlers((methods,))) as port:
        async with open_channel(f"127.0.0.1:{port}", max_message_bytes=2**20, own_connection=True) as channel:
            with pytest.raises(InvalidRequestError, match="larger than max"):
                await call(channel, "raw unary-stream")
        async with (
            open_channel(f"127.0.0.1:{port}", own_connection=True) as channel,
            Replies(raw.unary_stream(channel, SERVICE, "Send")(b""), len) as replies,
        ):
            assert [num_bytes async for num_bytes in replies] == [0, 5 * 2**20]


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        with pytest.raises(UnavailableError, match="Connection refused"):
            await call(channel, "unary")


@pytest.mark.parametrize(
    ("code", "details", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, "gone", errors.UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", errors.OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)", errors.InvalidRequestError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, "CANCELLED", errors.UnavailableError),
        (grpc.StatusCode.NOT_FOUND, "none", errors.NotFoundError),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", errors.InvalidRequestError),
        (grpc.StatusCode.ALREADY_EXISTS, "twice", errors.DuplicateRequestError),
        (grpc.StatusCode.DATA_LOSS, "lost", errors.CorruptBlockError),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", errors.UnavailableError),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", errors.UnavailableError),
        (grpc.StatusCode.INTERNAL, "other", KVRelayError),
        (grpc.StatusCode.FAILED_PRECONDITION, "no", KVRelayError),
    ],
)
def test_a_status_without_our_error_becomes_the_closest_class(
    code: grpc.StatusCode, details: str, error_class: type[KVRelayError]
) -> None:
    error = error_from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))

    assert type(error) is error_class
    assert error.message == details


def test_an_error_that_does_not_parse_falls_back_to_the_status() -> None:
    trailing = grpc.aio.Metadata(("kvrelay-error-bin", b"\xff\xff"))
    error = error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, "none"))

    assert type(error) is NotFoundError
