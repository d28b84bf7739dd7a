"""A port of a process, and what answers there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvrelay.rpc.call_limits import LimitsOf
from kvrelay.rpc.channel import MAX_MESSAGE_BYTES
from kvrelay.rpc.credentials import ServerTLS
from kvrelay.rpc.interceptor import Guard, OnError, OnOpen
from kvrelay.rpc.server import make_server


@dataclass(frozen=True, slots=True)
class Door:
    """`guard` is asked about each call, and `limits_of` says how much and how long it may be. What `register` adds is
    described to who asks for it if `service_names` names it."""

    port: int
    register: Callable[[grpc.aio.Server], None]
    service_names: tuple[str, ...]
    guard: Guard | None = None
    tls: ServerTLS | None = None
    limits_of: LimitsOf | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def make_server(self, on_error: OnError | None = None, on_open: OnOpen | None = None) -> grpc.aio.Server:
        """With its handlers, not bound yet."""
        server = make_server(
            on_error=on_error,
            on_open=on_open,
            guard=self.guard,
            limits_of=self.limits_of,
            max_message_bytes=self.max_message_bytes,
        )
        self.register(server)
        return server
