"""The Prefill service: protobuf in and out around `PrefillJobs`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from kvrelay.errors import UnavailableError
from kvrelay.pb import prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert_limits, convert_prefill
from kvrelay.rpc.node_service import NODE_SERVICE
from prefill_node.jobs import PrefillJobs

SERVICE_NAMES = ("kvrelay.pb.Prefill", NODE_SERVICE)

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Refuses until `jobs` is set, once the model is loaded."""

    def __init__(self) -> None:
        self.jobs: PrefillJobs | None = None

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        jobs = self._loaded()
        node_request, target = convert_prefill.prefill_request_from_pb(request)
        async with aclosing(jobs.run(node_request, target)) as events:
            async for event in events:
                yield convert_prefill.prefill_event_to_pb(event)

    async def SetLimits(
        self, request: prefill_pb2.SetPrefillLimitsRequest, context: Context
    ) -> prefill_pb2.SetPrefillLimitsReply:
        limits = await self._loaded().set_limits(convert_limits.prefill_limits_from_pb(request.limits))
        return prefill_pb2.SetPrefillLimitsReply(limits=convert_limits.prefill_limits_to_pb(limits))

    def _loaded(self) -> PrefillJobs:
        if self.jobs is None:
            raise UnavailableError("this prefill node is still loading its model")
        return self.jobs
