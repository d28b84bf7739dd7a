"""Methods whose messages are plain bytes: KV frames, which protobuf would copy twice more.

None as a (de)serializer is grpc's identity; a frame handed to grpc must be `bytes`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc

KV_TRANSFER = "kvrelay.pb.KVTransfer"

Context = grpc.aio.ServicerContext[Any, Any]
StreamStream = Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]
UnaryStream = Callable[[bytes, Context], AsyncIterator[bytes]]
StreamUnary = Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]


def raw_methods(
    service: str,
    *,
    stream_stream: Mapping[str, StreamStream] | None = None,
    unary_stream: Mapping[str, UnaryStream] | None = None,
    stream_unary: Mapping[str, StreamUnary] | None = None,
) -> grpc.GenericRpcHandler:
    """Handlers by method name, for `server.add_generic_rpc_handlers((raw_methods(...),))`."""
    make: Any = grpc  # the stubs know only handlers of synchronous servers
    handlers = {name: make.stream_stream_rpc_method_handler(run) for name, run in (stream_stream or {}).items()}
    handlers |= {name: make.unary_stream_rpc_method_handler(run) for name, run in (unary_stream or {}).items()}
    handlers |= {name: make.stream_unary_rpc_method_handler(run) for name, run in (stream_unary or {}).items()}
    return grpc.method_handlers_generic_handler(service, handlers)


def stream_stream(
    channel: grpc.aio.Channel, service: str, method: str
) -> grpc.aio.StreamStreamMultiCallable[bytes, bytes]:
    return channel.stream_stream(f"/{service}/{method}")


def unary_stream(
    channel: grpc.aio.Channel, service: str, method: str
) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    return channel.unary_stream(f"/{service}/{method}")


def stream_unary(
    channel: grpc.aio.Channel, service: str, method: str
) -> grpc.aio.StreamUnaryMultiCallable[bytes, bytes]:
    return channel.stream_unary(f"/{service}/{method}")
