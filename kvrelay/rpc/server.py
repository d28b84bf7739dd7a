"""Server side of every gRPC call: options, errors raised by handlers as statuses, binding, reflection."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Never

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import ConfigError, DeadlineError, InvalidRequestError, KVRelayError
from kvrelay.rpc import convert_errors, grpc_log, health
from kvrelay.rpc.call_limits import NO_LIMITS, CallLimits, LimitsOf
from kvrelay.rpc.channel import ERROR_KEY, KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from kvrelay.rpc.credentials import ServerTLS
from kvrelay.rpc.raw import KV_TRANSFER

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


def make_server(
    *,
    on_error: OnError | None = None,
    on_open: OnOpen | None = None,
    guard: Guard | None = None,
    limits_of: LimitsOf | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server whose handlers simply raise KVRelayErrors; `on_error` counts the calls that ended with one, `on_open`
    those that handlers are at work on. `guard` is asked about each call, of an unknown method too, before any of its
    message is read; `limits_of` says how much and how long a method may be."""
    grpc_log.calm()
    options = (
        *KEEPALIVE_OPTIONS,
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # else a second server takes the same port and half of its calls
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    )
    interceptor = ErrorInterceptor(on_error or _ignore, on_open or _ignore, guard, limits_of or _no_limits)
    return grpc.aio.server(interceptors=(interceptor,), options=options)


async def abort(context: Context, error: KVRelayError) -> Never:
    """Ends the call with the error's status, and the whole error in the trailing metadata."""
    message = _cut(error.message)
    wire = convert_errors.error_to_pb(error, message=message).SerializeToString()
    await context.abort(grpc.StatusCode[error.status.name], message, ((ERROR_KEY, wire),))
    raise AssertionError("abort returned")


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTLS | None = None) -> int:
    """The port the server will answer on once started, in the clear without `tls`.

    Raises ConfigError when it cannot be had.
    """
    _try_bind(host, port)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is not None:
            return server.add_secure_port(address, tls.of_server())
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}; choose others with --host and --port") from error


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Lets grpcurl and the like list services and call them without .proto files; raw ones have no schema to show."""
    described = (name for name in service_names if name != KV_TRANSFER)
    names = (*described, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
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
        arity = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
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
                await abort(context, error)
            except Exception:
                logger.exception("%s failed", method)
                self._on_error(method, KVRelayError.code)
                await abort(context, KVRelayError(f"{method} failed; the server's log says why"))
            finally:
                self._on_open(method, -1)

        return guarded


def _refusing(error: KVRelayError) -> Any:
    """A handler for calls of any kind: it reads nothing of them."""

    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

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


def _no_limits(method: str) -> CallLimits:
    return NO_LIMITS


def _ignore(method: str, what: str | int) -> None:
    pass


def _cut(message: str) -> str:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MAX_ERROR_BYTES:
        return message
    return encoded[: MAX_ERROR_BYTES - 3].decode("utf-8", "ignore") + "..."


def _try_bind(host: str, port: int) -> None:
    """Asks the system first: it says why not, where grpc only says that it failed, and logs about it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
