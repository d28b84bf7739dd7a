"""Clients of a coordinator in kvrelay's own types: `AsyncClient` for asyncio, `Client` for everything else.

Failures are the errors of kvrelay.errors. A stream that is left early is cancelled, which frees everything that the
request holds in the cluster.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvrelay.cluster import ClusterStatus, ListedModel, ModelInfo
from kvrelay.errors import UnavailableError
from kvrelay.inference import (
    ChoiceFinished,
    GenerateRequest,
    Prompt,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TokensGenerated,
)
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from kvrelay.rpc import convert_cluster, convert_inference
from kvrelay.rpc.calls import Replies, StreamCall, answer
from kvrelay.rpc.channel import open_channel
from kvrelay.sampling import SamplingParams

T = TypeVar("T")

CONTROL_TIMEOUT_S = 10.0
AnswerEvent = RequestAccepted | TokensGenerated | ChoiceFinished | RequestFinished


class AsyncClient:
    """Speaks to the coordinator at `address` (host:port). Belongs to one event loop."""

    def __init__(self, address: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._address = address
        self._channel = open_channel(address)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        n: int = 1,
        cache_salt: str | None = None,
        public_cache: str = "",
        cache_ttl_s: float | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The answer as it grows; RequestFinished is the last event.

        Of `n` answers the events come mixed, each with the index of its own; ChoiceFinished ends one. Answer i draws
        with kvrelay.sampling.fork_seed(seed, i). What the `cache` arguments mean is in
        kvrelay.inference.GenerateRequest.

        Raises what refused the request or ended it. Use contextlib.aclosing around it to leave it early.
        """
        request = GenerateRequest(
            prompt,
            sampling or SamplingParams(),
            request_id,
            model,
            n,
            cache_salt,
            public_cache,
            cache_ttl_s,
            priority,
        )
        call = self._inference.Generate(convert_inference.generate_request_to_pb(request), timeout=timeout_s)
        async with _AnswerReplies(call, self._address) as events:
            async for event in events:
                if isinstance(event, RequestFailed):
                    raise convert_inference.error_of(event)
                yield event
                if isinstance(event, RequestFinished):
                    return
        raise UnavailableError("the coordinator ended the stream before the answer was complete")

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        """The ids `generate` would use for a text or a chat."""
        request = convert_inference.tokenize_request_to_pb(prompt, model)
        call = self._inference.Tokenize(request, timeout=self._timeout_s)
        return await answer(call, lambda reply: tuple(reply.token_ids))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return await answer(self._inference.Detokenize(request, timeout=self._timeout_s), lambda reply: str(reply.text))

    async def get_model(self, model: str = "") -> ModelInfo:
        call = self._inference.GetModel(inference_pb2.GetModelRequest(model=model), timeout=self._timeout_s)
        return await answer(call, lambda reply: convert_cluster.model_info_from_pb(reply.model))

    async def list_models(self) -> tuple[ListedModel, ...]:
        """All that are served, ready or not, in the order of the coordinator's settings."""
        call = self._inference.ListModels(inference_pb2.ListModelsRequest(), timeout=self._timeout_s)
        return await answer(call, lambda reply: tuple(map(convert_inference.listed_model_from_pb, reply.models)))

    async def cancel(self, request_id: str) -> None:
        """Raises NotFoundError when no such request runs."""
        call = self._inference.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=self._timeout_s)
        await answer(call, lambda reply: None)

    async def status(self) -> ClusterStatus:
        call = self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=self._timeout_s)
        return await answer(call, convert_cluster.cluster_status_from_pb)


class _AnswerReplies(Replies[AnswerEvent | RequestFailed]):
    """Where the connection breaks once the answer has begun, the error says so."""

    def __init__(self, call: StreamCall, address: str) -> None:
        super().__init__(call, convert_inference.generate_event_from_pb)
        self._address = address
        self._has_begun = False

    async def __anext__(self) -> AnswerEvent | RequestFailed:
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


class Client:
    """As AsyncClient, blocking. Has an event loop in a thread of its own until closed; may be used by many threads."""

    def __init__(self, address: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay-client", daemon=True)
        self._thread.start()
        self._client = self._wait(_make(address, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        model: str = "",
        n: int = 1,
        cache_salt: str | None = None,
        public_cache: str = "",
        cache_ttl_s: float | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[AnswerEvent]:
        """As AsyncClient.generate; leaving the loop cancels the request."""
        events = self._client.generate(
            prompt,
            sampling,
            request_id=request_id,
            model=model,
            n=n,
            cache_salt=cache_salt,
            public_cache=public_cache,
            cache_ttl_s=cache_ttl_s,
            priority=priority,
            timeout_s=timeout_s,
        )
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            self._wait(events.aclose())

    def tokenize(self, prompt: Prompt, *, model: str = "") -> tuple[int, ...]:
        return self._wait(self._client.tokenize(prompt, model=model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return self._wait(self._client.detokenize(token_ids, model=model))

    def get_model(self, model: str = "") -> ModelInfo:
        return self._wait(self._client.get_model(model))

    def list_models(self) -> tuple[ListedModel, ...]:
        return self._wait(self._client.list_models())

    def cancel(self, request_id: str) -> None:
        self._wait(self._client.cancel(request_id))

    def status(self) -> ClusterStatus:
        return self._wait(self._client.status())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupted wait, by Ctrl-C say, ends its call too
            raise


async def _next(events: AsyncGenerator[AnswerEvent, None]) -> AnswerEvent | None:
    return await anext(events, None)


async def _make(address: str, timeout_s: float) -> AsyncClient:
    return AsyncClient(address, timeout_s=timeout_s)
