"""grpc.health.v1, driven by two switches: whether this process takes work, and whether it can ever again.

The service names, and "", answer readiness: NOT_SERVING takes a process out of a load balancer. The name "liveness"
answers whether it may be left alone: NOT_SERVING means that nothing but a restart will help.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "liveness"  # a service name to ask for

_Response: Any = health_pb2.HealthCheckResponse  # untyped upstream
ServingStatus = int  # of health_pb2


class Readiness:
    """`ready`: the process would serve a request sent now. `alive`: it would, now or when what ails it is over.

    Belongs to the event loop's thread.
    """

    def __init__(self, service_names: Iterable[str] = ()) -> None:
        self.ready = False
        self.reason = "starting"
        self.alive = True
        self._service_names = frozenset(service_names) | {""}
        self._first_ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, ready: bool, reason: str = "") -> None:
        """`reason` says why it is not ready. Does nothing once closed."""
        if not self._closed and (ready, reason) != (self.ready, self.reason):
            self._change(ready, reason)

    def close(self, reason: str) -> None:
        """Not ready, for good: the process is ending."""
        if not self._closed:
            self._closed = True
            self._change(False, reason)

    def set_alive(self, alive: bool, reason: str = "") -> None:
        """Also while closing; `reason` says why only a restart helps."""
        if alive != self.alive:
            self.alive = alive
            if alive:
                logger.info("alive again")
            else:
                logger.error("not alive: %s", reason)
            self._wake()

    def _change(self, ready: bool, reason: str) -> None:
        logger.info("%s", "ready" if ready else f"not ready: {reason}")
        self.ready, self.reason = ready, reason
        if ready:
            self._first_ready.set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_ready(self) -> None:
        """Returns when it is, or has been, ready."""
        await self._first_ready.wait()

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(_HealthServicer(self), server)

    def status(self, service: str) -> ServingStatus | None:
        """None for a service that is not here."""
        if service not in self._service_names and service != LIVENESS:
            return None
        serves = self.alive if service == LIVENESS else self.ready
        return int(_Response.SERVING if serves else _Response.NOT_SERVING)

    async def watch(self, service: str) -> AsyncIterator[ServingStatus]:
        """The status now, then each change; ends once closed, so that a watcher does not hold up the exit."""
        last = None
        while True:
            changed, status = self._changed, self.status(service)
            if status is None:
                status = _Response.SERVICE_UNKNOWN
            if status != last:
                yield status
                last = status
            elif self._closed:
                return
            else:
                await changed.wait()


class _HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        status = self._readiness.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r} here")
        return _Response(status=status)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: Context,
    ) -> AsyncIterator[Any]:
        async for status in self._readiness.watch(request.service):
            yield _Response(status=status)
