"""What surrounds every handler of a gRPC call: who may call, how much and how long it may be, and its errors."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Never

import grpc
from google.protobuf.message import DecodeError

from kvrelay.errors import DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.rpc import convert_errors
from kvrelay.rpc.call_limits import LimitsOf
from kvrelay.rpc.channel import ERROR_KEY

logger = logging.getLogger(__name__)

# Status and metadata travel in HTTP/2 headers, percent-encoded and base64; grpc refuses more than 8 KiB of them.
MAX_ERROR_BYTES = 1_000
UNKNOWN_METHOD = "unknown"  # to who counts: callers choose the names of those

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]
OnError = Callable[[str, str], None]  # method, error code
Metadata = Iterable[tuple[str, str | bytes]]
Guard = Callable[[str, Metadata], None]  # method and what the caller sent with it; raises KVRelayError to refuse it
OnOpen = Callable[[str, int], None]  # method, 1 when one of its calls begins and -1 when it is over


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status; a traceback goes to the log and never to the client.

    Streaming handlers become coroutines that write, so that a handler's `finally` runs as soon as its call is over:
    grpc itself leaves a cancelled generator to the garbage collector.
    """

    def __init__(self, on_error: OnError, on_open: OnOpen, guard: Guard | None, limits_of: LimitsOf) -> None:
        self._on_error = on_error
        self._on_open = on_open
        self._guard = guard
        self._limits_of = limits_of
        self._guarded: dict[str, tuple[Any, Any]] = {}  # handler found and handler made from it, by method

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if self._guard is not None:
            try:
                self._guard(method, handler_call_details.invocation_metadata)
            except KVRelayError as error:
                self._on_error(method if handler is not None else UNKNOWN_METHOD, error.code)
                return _refusing(error)
        if handler is None:
            return None
        found, guarded = self._guarded.get(method, (None, None))
        if found is not handler:
            guarded = self._wrap(method, handler)
            self._guarded[method] = (handler, guarded)
        return guarded

    def _wrap(self, method: str, handler: Any) -> Any:
        sent, answered = (
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        arity = f"{sent}_{answered}"
        run = getattr(handler, arity)
        if inspect.isasyncgenfunction(run):
            run = _writing(run)
        limits = self._limits_of(method)
        deserialize = handler.request_deserializer
        if deserialize is not None and not handler.request_streaming:
            run, deserialize = _parsing(run, deserialize, partial(limits.check_bytes, method)), None
        elif deserialize is not None:
            run = _parsing_stream(run)
        if limits.max_s:
            run = _within(run, method, limits.max_s)
        make = getattr(grpc, f"{arity}_rpc_method_handler")
        return make(self._mapping_errors(method, run), deserialize, handler.response_serializer)

    def _mapping_errors(self, method: str, run: Behavior) -> Behavior:
        async def guarded(request: Any, context: Context) -> Any:
            self._on_open(method, 1)
            try:
                return await run(request, context)
            except grpc.aio.AbortError:
                raise
            except KVRelayError as error:
                self._on_error(method, error.code)
                await _abort(context, error)
            except Exception:
                logger.exception("%s failed", method)
                self._on_error(method, KVRelayError.code)
                await _abort(context, KVRelayError(f"{method} failed; the server's log says why"))
            finally:
                self._on_open(method, -1)

        return guarded


def _refusing(error: KVRelayError) -> Any:
    """A handler for calls of any kind: it reads nothing of them."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, error)

    make: Any = grpc  # the stubs know only handlers of synchronous servers
    return make.stream_stream_rpc_method_handler(refuse)


def _within(run: Behavior, method: str, max_s: float) -> Behavior:
    async def run_within(request: Any, context: Context) -> Any:
        try:
            async with asyncio.timeout(max_s) as limit:
                return await run(request, context)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(f"{method.rpartition('/')[2]} took longer than the {max_s:g} s it may take") from error

    return run_within


def _parsing(run: Behavior, deserialize: Callable[[bytes], Any], check_bytes: Callable[[int], None]) -> Behavior:
    """Parses inside the handler, where a message that does not parse (a string that is no UTF-8, say) becomes an
    InvalidRequestError; grpc itself calls it UNKNOWN."""

    async def parse_and_run(request: bytes, context: Context) -> Any:
        check_bytes(len(request))
        try:
            message = deserialize(request)
        except DecodeError as error:
            raise InvalidRequestError(
                f"the request's {len(request)} bytes are no such message: wrong fields, or text that is not UTF-8"
            ) from error
        return await run(message, context)

    return parse_and_run


def _parsing_stream(run: Behavior) -> Behavior:
    """What `_parsing` is for one message, for the messages of a stream, which grpc parses while the handler reads."""

    async def read_and_run(requests: Any, context: Context) -> Any:
        try:
            return await run(requests, context)
        except DecodeError as error:
            raise InvalidRequestError(f"a message of the stream is not what belongs there: {error}") from error

    return read_and_run


def _writing(run: Behavior) -> Behavior:
    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(run(request, context)) as replies:
            async for reply in replies:
                await context.write(reply)

    return write_all


async def _abort(context: Context, error: KVRelayError) -> Never:
    """Ends the call with the error's status, and the whole error in the trailing metadata."""
    message = _cut(error.message)
    wire = convert_errors.error_to_pb(error, message=message).SerializeToString()
    await context.abort(grpc.StatusCode[error.status.name], message, ((ERROR_KEY, wire),))
    raise AssertionError("abort returned")


def _cut(message: str) -> str:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MAX_ERROR_BYTES:
        return message
    return encoded[: MAX_ERROR_BYTES - 3].decode("utf-8", "ignore") + "..."
