"""The coordinator's gRPC services: Inference for clients, Cluster for nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from coordinator.cluster import Cluster
from coordinator.front_door import FrontDoor
from coordinator.identity import Context, Identify
from coordinator.members import COMPUTING_ROLES, Member
from coordinator.response_cache import CACHE_HIT, CachedAnswer
from kvrelay.cluster import ClusterStatus, NodeReport
from kvrelay.errors import InvalidRequestError
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvrelay.rpc import convert_cluster, convert_explain, convert_inference
from kvrelay.types import InstanceId

CLUSTER_SERVICE = "kvrelay.pb.Cluster"
SERVICE_NAMES = ("kvrelay.pb.Inference", CLUSTER_SERVICE)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, door: FrontDoor, default_max_tokens: int, identify: Identify) -> None:
        self._door = door
        self._identify = identify
        self._default_max_tokens = default_max_tokens

    def register(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        wanted = convert_inference.generate_request_from_pb(request)
        answer = await self._door.accept(wanted, self._identify(context))
        if isinstance(answer, CachedAnswer):
            await context.send_initial_metadata((CACHE_HIT,))
        try:
            async for event in answer.events():
                yield convert_inference.generate_event_to_pb(event)
        finally:
            answer.left()  # does nothing when the request is over

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeReply:
        text = self._door.models.find(request.model).text
        prompt = convert_inference.tokenize_prompt_from_pb(request)
        token_ids = await text.prompt_ids(prompt, text.tokenizer.vocab_size)
        return inference_pb2.TokenizeReply(token_ids=token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeReply:
        model = self._door.models.find(request.model)
        return inference_pb2.DetokenizeReply(text=model.text.decode(request.token_ids, model.info.vocab_size))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelReply:
        model = convert_cluster.model_info_to_pb(self._door.models.find(request.model).info)
        return inference_pb2.GetModelReply(model=model, default_max_tokens=self._default_max_tokens)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsReply:
        models = [convert_inference.listed_model_to_pb(model.listed()) for model in self._door.models]
        return inference_pb2.ListModelsReply(models=models)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelReply:
        self._door.cancel(request.request_id, self._identify(context).tenant)
        return inference_pb2.CancelReply()

    async def Explain(self, request: inference_pb2.ExplainRequest, context: Context) -> inference_pb2.ExplainReply:
        explanation = self._door.explain(request.request_id, self._identify(context).tenant)
        return convert_explain.explanation_to_pb(explanation)


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    def __init__(self, door: FrontDoor, instance_id: InstanceId) -> None:
        self._door = door
        self._instance_id = instance_id

    def register(self, server: grpc.aio.Server) -> None:
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, server)

    async def Join(
        self, request_iterator: AsyncIterator[cluster_pb2.NodeEvent], context: grpc.ServicerContext
    ) -> AsyncIterator[cluster_pb2.JoinEvent]:
        joined: tuple[Cluster, Member] | None = None
        try:
            async for event in request_iterator:
                if event.WhichOneof("event") == "joined" and joined is None:
                    joined = self._door.models.join(convert_cluster.node_info_from_pb(event.joined))
                    accepted = cluster_pb2.JoinAccepted(coordinator_instance_id=self._instance_id)
                    yield cluster_pb2.JoinEvent(accepted=accepted)
                    if joined[1].info.role in COMPUTING_ROLES:
                        yield cluster_pb2.JoinEvent(resync=cluster_pb2.Resync())
                elif event.WhichOneof("event") == "status" and joined is not None:
                    cluster, member = joined
                    cluster.update(member, convert_cluster.node_status_from_pb(event.status))
                elif event.WhichOneof("event") == "cache" and joined is not None:
                    cluster, member = joined
                    if cluster.cache_told(member, convert_cluster.cache_events_from_pb(event.cache)):
                        yield cluster_pb2.JoinEvent(resync=cluster_pb2.Resync())
                else:
                    raise InvalidRequestError("a Join stream is one NodeJoined, then NodeStatus and CacheEvents")
        finally:
            if joined is not None:
                cluster, member = joined
                cluster.disconnect(member)

    async def GetStatus(
        self, request: cluster_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.GetStatusReply:
        now = asyncio.get_running_loop().time()
        reports = [NodeReport(one.info, one.status, now - one.last_seen) for one in self._door.models.members]
        num_queued = self._door.num_waiting
        num_running = self._door.num_open - num_queued
        ready = not self._door.why_not_ready()
        return convert_cluster.cluster_status_to_pb(ClusterStatus(tuple(reports), num_queued, num_running, ready))
