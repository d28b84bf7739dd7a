"""The messages of clients: protobuf to our dataclasses and back, as in `convert` for those of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay import types
from kvrelay.errors import InvalidRequestError, KVRelayError
from kvrelay.kv.layout import NodeInfo
from kvrelay.pb import cluster_pb2, inference_pb2, types_pb2
from kvrelay.rpc import convert
from kvrelay.types import NodeStatus, Prompt, RequestId


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One member as the coordinator sees it; `age_s` since its last status."""

    info: NodeInfo
    status: NodeStatus
    age_s: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    nodes: tuple[NodeReport, ...]
    num_queued: int
    num_running: int
    ready: bool


def chat_to_pb(chat: types.ChatPrompt) -> inference_pb2.Chat:
    messages = [inference_pb2.ChatMessage(role=entry.role, content=entry.content) for entry in chat.messages]
    return inference_pb2.Chat(messages=messages)


def chat_from_pb(wire: inference_pb2.Chat) -> types.ChatPrompt:
    return types.ChatPrompt(tuple(types.ChatMessage(entry.role, entry.content) for entry in wire.messages))


def generate_request_to_pb(request: types.GenerateRequest) -> inference_pb2.GenerateRequest:
    wire = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=convert.sampling_params_to_pb(request.sampling),
    )
    match request.prompt:
        case types.TextPrompt(text):
            wire.text = text
        case types.TokenPrompt(token_ids):
            wire.token_ids.CopyFrom(types_pb2.TokenIds(ids=token_ids))
        case types.ChatPrompt():
            wire.chat.CopyFrom(chat_to_pb(request.prompt))
        case None:
            pass
    return wire


def generate_request_from_pb(wire: inference_pb2.GenerateRequest) -> types.GenerateRequest:
    """Values are for the coordinator to check."""
    return types.GenerateRequest(
        prompt=_prompt_from_pb(wire),
        sampling=convert.sampling_params_from_pb(wire.sampling),
        request_id=wire.request_id,
        model=wire.model,
    )


def _prompt_from_pb(wire: inference_pb2.GenerateRequest) -> Prompt | None:
    match wire.WhichOneof("prompt"):
        case "text":
            return types.TextPrompt(wire.text)
        case "token_ids":
            return types.TokenPrompt(tuple(wire.token_ids.ids))
        case "chat":
            return chat_from_pb(wire.chat)
        case _:
            return None


def tokenize_request_to_pb(prompt: Prompt, model: str) -> inference_pb2.TokenizeRequest:
    """Raises InvalidRequestError for token ids."""
    if isinstance(prompt, types.TextPrompt):
        return inference_pb2.TokenizeRequest(model=model, text=prompt.text)
    if isinstance(prompt, types.ChatPrompt):
        return inference_pb2.TokenizeRequest(model=model, chat=chat_to_pb(prompt))
    raise InvalidRequestError("token ids are tokenized already")


def tokenize_prompt_from_pb(wire: inference_pb2.TokenizeRequest) -> Prompt | None:
    match wire.WhichOneof("input"):
        case "text":
            return types.TextPrompt(wire.text)
        case "chat":
            return chat_from_pb(wire.chat)
        case _:
            return None


def generate_event_to_pb(event: types.GenerateEvent) -> inference_pb2.GenerateEvent:
    match event:
        case types.RequestAccepted():
            accepted = inference_pb2.RequestAccepted(
                request_id=event.request_id,
                prompt_tokens=event.prompt_tokens,
                seed=event.seed,
                max_tokens=event.max_tokens,
            )
            return inference_pb2.GenerateEvent(accepted=accepted)
        case types.TokensGenerated():
            ids, logprobs = convert.tokens_to_pb(event.tokens)
            tokens = inference_pb2.TokensGenerated(token_ids=ids, text=event.text, logprobs=logprobs)
            return inference_pb2.GenerateEvent(tokens=tokens)
        case types.RequestFinished():
            return inference_pb2.GenerateEvent(finished=_finished_to_pb(event))
        case types.RequestFailed():
            error = types_pb2.Error(
                code=event.code, message=event.message, retryable=event.retryable, retry_after_s=event.retry_after_s
            )
            return inference_pb2.GenerateEvent(failed=inference_pb2.RequestFailed(error=error))


def generate_event_from_pb(wire: inference_pb2.GenerateEvent) -> types.GenerateEvent:
    match wire.WhichOneof("event"):
        case "accepted":
            accepted = wire.accepted
            return types.RequestAccepted(
                RequestId(accepted.request_id), accepted.prompt_tokens, accepted.seed, accepted.max_tokens
            )
        case "tokens":
            tokens = convert.tokens_from_pb(wire.tokens.token_ids, wire.tokens.logprobs)
            return types.TokensGenerated(tokens, wire.tokens.text)
        case "finished":
            return _finished_from_pb(wire.finished)
        case "failed":
            error = wire.failed.error
            return types.RequestFailed(error.code, error.message, error.retryable, error.retry_after_s)
        case _:
            raise InvalidRequestError("a GenerateEvent that says nothing; is the server newer than this client?")


def error_of(failed: types.RequestFailed) -> KVRelayError:
    """The exception that a client raises for a failed request."""
    wire = types_pb2.Error(
        code=failed.code, message=failed.message, retryable=failed.retryable, retry_after_s=failed.retry_after_s
    )
    return convert.error_from_pb(wire)


def _finished_to_pb(event: types.RequestFinished) -> inference_pb2.RequestFinished:
    usage, timing = event.usage, event.timing
    return inference_pb2.RequestFinished(
        reason=convert.finish_reason_to_pb(event.reason),
        usage=types_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached=convert.cached_tokens_to_pb(usage.cached),
        ),
        timing=types_pb2.Timing(
            queue_s=timing.queue_s,
            first_token_s=timing.first_token_s,
            total_s=timing.total_s,
            prefill_s=timing.prefill_s,
            handoff_s=timing.handoff_s,
        ),
        prefill_node=event.prefill_node,
        decode_node=event.decode_node,
        handoff_bytes=event.handoff_bytes,
        stop_string=event.stop_string,
        retries=event.retries,
    )


def _finished_from_pb(wire: inference_pb2.RequestFinished) -> types.RequestFinished:
    usage, timing = wire.usage, wire.timing
    return types.RequestFinished(
        reason=convert.finish_reason_from_pb(wire.reason),
        usage=types.Usage(usage.prompt_tokens, usage.completion_tokens, convert.cached_tokens_from_pb(usage.cached)),
        timing=types.Timing(timing.queue_s, timing.first_token_s, timing.total_s, timing.prefill_s, timing.handoff_s),
        prefill_node=wire.prefill_node,
        decode_node=wire.decode_node,
        handoff_bytes=wire.handoff_bytes,
        stop_string=wire.stop_string,
        retries=wire.retries,
    )


def cluster_status_to_pb(status: ClusterStatus) -> cluster_pb2.GetStatusReply:
    return cluster_pb2.GetStatusReply(
        nodes=_reports_to_pb(status.nodes),
        num_queued=status.num_queued,
        num_running=status.num_running,
        ready=status.ready,
    )


def _reports_to_pb(reports: Sequence[NodeReport]) -> list[cluster_pb2.NodeReport]:
    return [
        cluster_pb2.NodeReport(
            node=convert.node_info_to_pb(report.info),
            status=convert.node_status_to_pb(report.status),
            age_s=report.age_s,
        )
        for report in reports
    ]


def cluster_status_from_pb(wire: cluster_pb2.GetStatusReply) -> ClusterStatus:
    nodes = tuple(
        NodeReport(convert.node_info_from_pb(report.node), convert.node_status_from_pb(report.status), report.age_s)
        for report in wire.nodes
    )
    return ClusterStatus(nodes, wire.num_queued, wire.num_running, wire.ready)
