"""How much and how long a method may be, at a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.errors import DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.rpc.call_limits import CallLimits
from kvrelay.rpc.channel import error_from_rpc
from kvrelay.rpc.server import bind, make_server

TIMEOUT_S = 60.0
LIMITS = {"/x.Y/Short": CallLimits(max_bytes=10), "/x.Y/Quick": CallLimits(max_s=0.05), "/x.Y/Free": CallLimits()}


async def count(request: bytes, context: Any) -> bytes:
    return str(len(request)).encode()


async def hang(request: bytes, context: Any) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def asked(method: str, message: bytes) -> bytes | KVRelayError:
    server = make_server(limits_of=LIMITS.__getitem__)
    make: Any = grpc.unary_unary_rpc_method_handler
    handlers = {"Short": make(count, bytes), "Quick": make(hang, bytes), "Free": make(count, bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", handlers),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return bytes(await channel.unary_unary(method)(message, timeout=TIMEOUT_S))
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    finally:
        await server.stop(None)


async def test_a_request_of_as_many_bytes_as_are_allowed_is_served_and_one_more_is_not() -> None:
    assert await asked("/x.Y/Short", b"0123456789") == b"10"
    refused = await asked("/x.Y/Short", b"0123456789a")
    assert isinstance(refused, InvalidRequestError)
    assert refused.message == "the request has 11 bytes; Short takes at most 10"


async def test_a_call_that_takes_too_long_is_ended() -> None:
    ended = await asked("/x.Y/Quick", b"")
    assert isinstance(ended, DeadlineError)
    assert ended.message == "Quick took longer than the 0.05 s it may take"


@pytest.mark.parametrize("num_bytes", [0, 1_000_000])
async def test_without_limits_there_are_none(num_bytes: int) -> None:
    assert await asked("/x.Y/Free", bytes(num_bytes)) == str(num_bytes).encode()
