"""A port of a process, and what answers there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from kvrelay.rpc.credentials import ServerTLS
from kvrelay.rpc.server import Guard


@dataclass(frozen=True, slots=True)
class Door:
    """`guard` is asked about each call. What `register` adds is described to who asks for it if `service_names` names
    it."""

    port: int
    register: Callable[[grpc.aio.Server], None]
    service_names: tuple[str, ...]
    guard: Guard | None = None
    tls: ServerTLS | None = None
