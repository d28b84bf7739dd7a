"""The gRPC service of vLLM's engines, `vllm.grpc.engine.VllmEngine`, for gateways built for it.

To them the whole cluster is one engine.

The protocol is that of PyPI's smg-grpc-proto. What it has no field for travels as metadata (coordinator.vllm_engine.
requests); who calls is found as at every other door.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from coordinator.front_door import FrontDoor
from coordinator.identity import Context, Identify
from coordinator.response_cache import CACHE_HIT, CachedAnswer
from coordinator.served_models import ServedModel
from coordinator.vllm_engine.replies import Replies
from coordinator.vllm_engine.reports import loads_to_pb, model_info_to_pb, server_info_to_pb
from coordinator.vllm_engine.requests import MODEL_KEY, request_from_pb
from coordinator.vllm_engine.tokenizer_bundle import TokenizerBundle, make_bundle
from kvrelay.cluster import NodeStatus
from kvrelay.errors import NotFoundError, UnimplementedError
from kvrelay.inference import RequestFailed
from kvrelay.rpc.convert_inference import error_of
from kvrelay.types import Role

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the package has no types
    """`paths` are the models' files, by the names they are served under. Embed, FlushCache, profiles and KV events
    are UNIMPLEMENTED."""

    def __init__(self, door: FrontDoor, identify: Identify, paths: Mapping[str, Path]) -> None:
        self._door = door
        self._identify = identify
        self._paths = paths
        self._bundles: dict[str, TokenizerBundle] = {}
        self._started_at = self._now()

    def register(self, server: Any) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        wanted = request_from_pb(request, _metadata(context))
        answer = await self._door.accept(wanted, self._identify(context))
        if isinstance(answer, CachedAnswer):
            await context.send_initial_metadata((CACHE_HIT,))
        replies = Replies(num_answers=wanted.n, stream=request.stream, stop_token_ids=wanted.sampling.stop_token_ids)
        try:
            async for event in answer.events():
                if isinstance(event, RequestFailed):
                    raise error_of(event)
                for reply in replies.of(event):
                    yield reply
        finally:
            answer.left()  # does nothing when the request is over

    async def Abort(self, request: Any, context: Context) -> Any:
        tenant = self._identify(context).tenant
        for request_id in request.request_ids:
            with suppress(NotFoundError):  # it may just have ended
                self._door.cancel(request_id, tenant)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        why_not = self._door.why_not_ready()
        return vllm_engine_pb2.HealthCheckResponse(healthy=not why_not, message=why_not or "ready")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        served = self._served(context)
        bos_token_id = served.text.tokenizer.bos_token_id
        return model_info_to_pb(served.info, str(self._paths[served.name]), bos_token_id)

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        served = self._served(context)
        return server_info_to_pb(
            served.info,
            _statuses(served, Role.DECODE_NODE),
            num_open=self._door.num_open,
            is_paused=bool(self._door.why_not_ready()),
            uptime_s=self._now() - self._started_at,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        served = self._served(context)
        return loads_to_pb(
            _statuses(served, Role.DECODE_NODE),
            _statuses(served, Role.PREFILL_NODE),
            block_tokens=served.info.layout.block_tokens,
            num_waiting=self._door.num_waiting,
            num_open=self._door.num_open,
            now=datetime.now(UTC),
            version=version("kvrelay"),
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        name = self._served(context).name
        if name not in self._bundles:
            self._bundles[name] = await asyncio.to_thread(make_bundle, self._paths[name])
        for data, sha256 in self._bundles[name].chunks():
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256)

    async def Embed(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("embeddings are not served; only answers to text are")

    async def FlushCache(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("the nodes' caches cannot be flushed; blocks that are not used again make room")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("nodes have no profiler to start")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        raise UnimplementedError("nodes have no profiler to stop")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        raise UnimplementedError("KV events are not told here; the coordinator places requests by what is cached")
        yield

    def _served(self, context: Context) -> ServedModel:
        """Raises as ServedModels.find."""
        return self._door.models.find(_metadata(context).get(MODEL_KEY, ""))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _statuses(served: ServedModel, role: Role) -> list[NodeStatus]:
    return [member.status for member in served.cluster.members.all() if member.info.role is role]


def _metadata(context: Context) -> dict[str, str]:
    pairs = context.invocation_metadata() or ()
    return {key: value for key, value in pairs if isinstance(value, str)}
