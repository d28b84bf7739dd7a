"""Client side of one coordinator's services, in our own types. Which of several is asked, `kvrelay.client` decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.cluster import ClusterStatus, ListedModel, ModelInfo
from kvrelay.errors import UnavailableError
from kvrelay.explanation import Explanation
from kvrelay.inference import GenerateEvent, GenerateRequest, Prompt
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvrelay.rpc import convert_cluster, convert_explain, convert_inference
from kvrelay.rpc.calls import Replies, StreamCall, answer
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.credentials import ChannelTLS


class CoordinatorClient:
    """Calls raise KVRelayError. Belongs to one event loop. Times are in seconds."""

    def __init__(self, address: str, api_key: str = "", tls: ChannelTLS | None = None) -> None:
        """`api_key` is sent with every call; an API key or a token."""
        self.address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = open_channel(address, tls=tls)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def _with(self, timeout_s: float | None) -> dict[str, Any]:
        """What every call has beside its request."""
        return {"timeout": timeout_s, "metadata": self._metadata}

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> Replies[GenerateEvent]:
        wire = convert_inference.generate_request_to_pb(request)
        return _AnswerReplies(self._inference.Generate(wire, **self._with(timeout_s)), self.address)

    async def tokenize(self, prompt: Prompt, model: str, timeout_s: float) -> tuple[int, ...]:
        request = convert_inference.tokenize_request_to_pb(prompt, model)
        call = self._inference.Tokenize(request, **self._with(timeout_s))
        return await answer(call, lambda reply: tuple(reply.token_ids))

    async def detokenize(self, token_ids: Sequence[int], model: str, timeout_s: float) -> str:
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return await answer(
            self._inference.Detokenize(request, **self._with(timeout_s)),
            lambda reply: str(reply.text),
        )

    async def get_model(self, model: str, timeout_s: float) -> ModelInfo:
        call = self._inference.GetModel(
            inference_pb2.GetModelRequest(model=model), timeout=timeout_s, metadata=self._metadata
        )
        return await answer(call, lambda reply: convert_cluster.model_info_from_pb(reply.model))

    async def list_models(self, timeout_s: float) -> tuple[ListedModel, ...]:
        call = self._inference.ListModels(inference_pb2.ListModelsRequest(), **self._with(timeout_s))
        return await answer(call, lambda reply: tuple(map(convert_inference.listed_model_from_pb, reply.models)))

    async def cancel(self, request_id: str, timeout_s: float) -> None:
        call = self._inference.Cancel(
            inference_pb2.CancelRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
        )
        await answer(call, lambda reply: None)

    async def explain(self, request_id: str, timeout_s: float) -> Explanation:
        call = self._inference.Explain(
            inference_pb2.ExplainRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
        )
        return await answer(call, convert_explain.explanation_from_pb)

    async def status(self, timeout_s: float) -> ClusterStatus:
        call = self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), **self._with(timeout_s))
        return await answer(call, convert_cluster.cluster_status_from_pb)


class _AnswerReplies(Replies[GenerateEvent]):
    """Where the connection breaks once the answer has begun, the error says so."""

    def __init__(self, call: StreamCall, address: str) -> None:
        super().__init__(call, convert_inference.generate_event_from_pb)
        self._address = address
        self._has_begun = False

    async def __anext__(self) -> GenerateEvent:
        try:
            event = await super().__anext__()
        except UnavailableError as error:
            if not self._has_begun:
                raise
            raise UnavailableError(
                f"the coordinator at {self._address} went away in the middle of the answer ({error.message}); "
                "ask again, or another one"
            ) from error
        self._has_begun = True
        return event
