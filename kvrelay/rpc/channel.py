"""Client side of every gRPC call: channels that find dead peers, calls that really end, failures as our errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvrelay.errors import (
    CorruptBlockError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    KVRelayError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvrelay.pb import types_pb2
from kvrelay.rpc import convert_errors
from kvrelay.rpc.credentials import ChannelTLS

MAX_MESSAGE_BYTES = 64 * 2**20
OTHER_TLS = (
    "ends the TLS handshake, or speaks no TLS: where roles have certificates, name those of one by KVRELAY_PEER_CA, "
    "KVRELAY_PEER_CERT and KVRELAY_PEER_KEY (docs/security.md); where they have none, unset these"
)
ERROR_KEY = "kvrelay-error-bin"  # trailing metadata: an Error message

# A peer that stops answering is found within 4 s. Without the ping timeout, which is 60 s by default, keepalive alone
# never noticed a stopped or black-holed peer.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# The first bounds also how long one connection attempt may take (20 s by default).
_RECONNECT_OPTIONS = (
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_BY_STATUS: dict[grpc.StatusCode, type[KVRelayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: UnavailableError,  # by a peer that shuts down; our own never come here
    grpc.StatusCode.DATA_LOSS: CorruptBlockError,
}


class Cancellable(Protocol):
    def cancel(self) -> bool: ...


C = TypeVar("C", bound=Cancellable)


def open_channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    own_connection: bool = False,
    tls: ChannelTLS | None = None,
) -> grpc.aio.Channel:
    """A lazy channel to host:port, plain without `tls`. Channels to one address share a TCP connection unless
    `own_connection`."""
    options = [
        *KEEPALIVE_OPTIONS,
        *_RECONNECT_OPTIONS,
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.use_local_subchannel_pool", int(own_connection)),
    ]
    if tls is not None:
        return grpc.aio.secure_channel(address, tls.of_channel(), options=options)
    return grpc.aio.insecure_channel(address, options=options)


@asynccontextmanager
async def cancelling(call: C) -> AsyncIterator[C]:
    """Ends the call on the way out, however that is taken; grpc.aio leaves a dropped stream running."""
    try:
        yield call
    finally:
        call.cancel()


def error_from_rpc(error: grpc.aio.AioRpcError) -> KVRelayError:
    """What the server raised, from the trailing metadata; of anything else, what its status comes closest to."""
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return convert_errors.error_from_pb(types_pb2.Error.FromString(value))
            except DecodeError:
                break
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return KVRelayError(
            "what answers there knows no such call: it plays another role, so give another port (`kvrelay status` "
            "shows whose each is), or is of another release"
        )
    return _error_class(error.code(), details)(details)


def speaks_other_tls(message: str) -> bool:
    """Of a connection that was not made, in gRPC 1.85's words: whether one side speaks no TLS, or is of another CA."""
    said = message.lower()
    return "failed to connect" in said and ("socket closed" in said or "tls handshake failed" in said)


def _error_class(status: grpc.StatusCode, details: str) -> type[KVRelayError]:
    if "message larger than max" in details:  # grpc says RESOURCE_EXHAUSTED, but no retry will help
        return InvalidRequestError
    if status is grpc.StatusCode.INTERNAL and ("RST_STREAM" in details or "from Core" in details):
        return UnavailableError  # the connection broke while we wrote
    return _BY_STATUS.get(status, KVRelayError)
