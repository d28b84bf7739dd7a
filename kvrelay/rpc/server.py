"""A server's end of gRPC: options, binding, reflection."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

import grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import ConfigError
from kvrelay.rpc import grpc_log, health
from kvrelay.rpc.call_limits import NO_LIMITS, CallLimits, LimitsOf
from kvrelay.rpc.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from kvrelay.rpc.credentials import ServerTLS
from kvrelay.rpc.interceptor import CallInterceptor, Guard, OnError, OnOpen
from kvrelay.rpc.raw import KV_TRANSFER


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
    interceptor = CallInterceptor(on_error or _ignore, on_open or _ignore, guard, limits_of or _no_limits)
    return grpc.aio.server(interceptors=(interceptor,), options=options)


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


def _no_limits(method: str) -> CallLimits:
    return NO_LIMITS


def _ignore(method: str, what: str | int) -> None:
    pass


def _try_bind(host: str, port: int) -> None:
    """Asks the system first: it says why not, where grpc only says that it failed, and logs about it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
