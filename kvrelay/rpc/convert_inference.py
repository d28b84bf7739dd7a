"""Messages of inference.proto to our dataclasses and back."""

from __future__ import annotations

from kvrelay.cluster import ListedModel
from kvrelay.errors import InvalidRequestError, KVRelayError
from kvrelay.inference import (
    ChatEnd,
    ChatMessage,
    ChatPrompt,
    ChoiceFinished,
    GenerateEvent,
    GenerateRequest,
    Prompt,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TextPrompt,
    Timing,
    TokenPrompt,
    TokensGenerated,
    ToolCall,
    Usage,
)
from kvrelay.pb import inference_pb2, types_pb2
from kvrelay.rpc.convert_cluster import model_info_from_pb, model_info_to_pb
from kvrelay.rpc.convert_errors import error_from_pb
from kvrelay.rpc.convert_types import (
    cached_tokens_from_pb,
    cached_tokens_to_pb,
    finish_reason_from_pb,
    finish_reason_to_pb,
    sampling_params_from_pb,
    sampling_params_to_pb,
    tokens_from_pb,
    tokens_to_pb,
)
from kvrelay.types import RequestId

_CHAT_ENDS = {
    ChatEnd.ANSWER: inference_pb2.CHAT_END_ANSWER,
    ChatEnd.LAST_MESSAGE: inference_pb2.CHAT_END_LAST_MESSAGE,
    ChatEnd.NOTHING: inference_pb2.CHAT_END_NOTHING,
}
_CHAT_ENDS_FROM_PB = {wire: end for end, wire in _CHAT_ENDS.items()}


def chat_to_pb(chat: ChatPrompt) -> inference_pb2.Chat:
    return inference_pb2.Chat(
        messages=[_chat_message_to_pb(message) for message in chat.messages],
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        end=_CHAT_ENDS[chat.end],
    )


def _chat_message_to_pb(message: ChatMessage) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=[
            inference_pb2.ToolCall(call_id=call.call_id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def chat_from_pb(wire: inference_pb2.Chat) -> ChatPrompt:
    """Raises InvalidRequestError for an end that is not known."""
    if wire.end not in _CHAT_ENDS_FROM_PB:
        raise InvalidRequestError(f"chat.end is {wire.end}; allowed is [0, {len(_CHAT_ENDS) - 1}]")
    return ChatPrompt(
        tuple(_chat_message_from_pb(message) for message in wire.messages),
        wire.tools,
        wire.template_kwargs,
        _CHAT_ENDS_FROM_PB[wire.end],
    )


def _chat_message_from_pb(wire: inference_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(
        wire.role,
        wire.content,
        tuple(ToolCall(call.call_id, call.name, call.arguments) for call in wire.tool_calls),
        wire.tool_call_id,
        wire.name,
    )


def generate_request_to_pb(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequestError for values that the schema cannot carry, such as negative counts."""
    if request.n == 0:
        request.check_n()  # on the wire 0 would be one
    try:
        return _generate_request_to_pb(request)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request has a value out of range: {error}") from error


def _generate_request_to_pb(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    wire = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=sampling_params_to_pb(request.sampling),
        n=request.n,
        cache_salt=request.cache_salt,
        public_cache=request.public_cache,
        cache_ttl_s=request.cache_ttl_s,
        priority=request.priority,
        ttft_target_s=request.ttft_target_s,
        itl_target_s=request.itl_target_s,
        best_effort=request.best_effort,
        keep_s=request.keep_s,
    )
    match request.prompt:
        case TextPrompt(text, add_bos):
            wire.text, wire.without_bos = text, not add_bos
        case TokenPrompt(token_ids):
            wire.token_ids.CopyFrom(types_pb2.TokenIds(ids=token_ids))
        case ChatPrompt():
            wire.chat.CopyFrom(chat_to_pb(request.prompt))
        case None:
            pass
    return wire


def generate_request_from_pb(wire: inference_pb2.GenerateRequest) -> GenerateRequest:
    """Values are for the coordinator to check."""
    return GenerateRequest(
        prompt=_prompt_from_pb(wire),
        sampling=sampling_params_from_pb(wire.sampling),
        request_id=wire.request_id,
        model=wire.model,
        n=wire.n or 1,
        cache_salt=wire.cache_salt if wire.HasField("cache_salt") else None,
        public_cache=wire.public_cache,
        cache_ttl_s=wire.cache_ttl_s if wire.HasField("cache_ttl_s") else None,
        priority=wire.priority if wire.HasField("priority") else None,
        ttft_target_s=wire.ttft_target_s if wire.HasField("ttft_target_s") else None,
        itl_target_s=wire.itl_target_s if wire.HasField("itl_target_s") else None,
        best_effort=wire.best_effort,
        keep_s=wire.keep_s,
    )


def _prompt_from_pb(wire: inference_pb2.GenerateRequest) -> Prompt | None:
    match wire.WhichOneof("prompt"):
        case "text":
            return TextPrompt(wire.text, add_bos=not wire.without_bos)
        case "token_ids":
            return TokenPrompt(tuple(wire.token_ids.ids))
        case "chat":
            return chat_from_pb(wire.chat)
        case _:
            return None


def tokenize_request_to_pb(prompt: Prompt, model: str) -> inference_pb2.TokenizeRequest:
    """Raises InvalidRequestError for token ids."""
    if isinstance(prompt, TextPrompt):
        return inference_pb2.TokenizeRequest(model=model, text=prompt.text, without_bos=not prompt.add_bos)
    if isinstance(prompt, ChatPrompt):
        return inference_pb2.TokenizeRequest(model=model, chat=chat_to_pb(prompt))
    raise InvalidRequestError("token ids are tokenized already")


def tokenize_prompt_from_pb(wire: inference_pb2.TokenizeRequest) -> Prompt | None:
    match wire.WhichOneof("input"):
        case "text":
            return TextPrompt(wire.text, add_bos=not wire.without_bos)
        case "chat":
            return chat_from_pb(wire.chat)
        case _:
            return None


def generate_event_to_pb(event: GenerateEvent) -> inference_pb2.GenerateEvent:
    match event:
        case TokensGenerated():  # of all events the most by far
            ids, logprobs = tokens_to_pb(event.tokens)
            wire = inference_pb2.GenerateEvent()
            tokens = wire.tokens  # filled in place: setting a message that is made apart copies it
            tokens.token_ids.extend(ids)
            tokens.text, tokens.index = event.text, event.index
            if logprobs:
                tokens.logprobs.extend(logprobs)
            return wire
        case RequestAccepted():
            accepted = inference_pb2.RequestAccepted(
                request_id=event.request_id,
                prompt_tokens=event.prompt_tokens,
                seed=event.seed,
                max_tokens=event.max_tokens,
            )
            return inference_pb2.GenerateEvent(accepted=accepted)
        case ChoiceFinished():
            choice = inference_pb2.ChoiceFinished(
                index=event.index,
                reason=finish_reason_to_pb(event.reason),
                stop_string=event.stop_string,
                completion_tokens=event.completion_tokens,
            )
            return inference_pb2.GenerateEvent(choice_finished=choice)
        case RequestFinished():
            return inference_pb2.GenerateEvent(finished=_finished_to_pb(event))
        case RequestFailed():
            return inference_pb2.GenerateEvent(failed=inference_pb2.RequestFailed(error=failed_to_pb(event)))


def generate_event_from_pb(wire: inference_pb2.GenerateEvent) -> GenerateEvent:
    match wire.WhichOneof("event"):
        case "accepted":
            accepted = wire.accepted
            return RequestAccepted(
                RequestId(accepted.request_id), accepted.prompt_tokens, accepted.seed, accepted.max_tokens
            )
        case "tokens":
            tokens = tokens_from_pb(wire.tokens.token_ids, wire.tokens.logprobs)
            return TokensGenerated(tokens, wire.tokens.text, wire.tokens.index)
        case "choice_finished":
            choice = wire.choice_finished
            return ChoiceFinished(
                choice.index, finish_reason_from_pb(choice.reason), choice.stop_string, choice.completion_tokens
            )
        case "finished":
            return _finished_from_pb(wire.finished)
        case "failed":
            return failed_from_pb(wire.failed.error)
        case _:
            raise InvalidRequestError("a GenerateEvent that says nothing; is the server newer than this client?")


def error_of(failed: RequestFailed) -> KVRelayError:
    """The exception that a client raises for a failed request."""
    return error_from_pb(failed_to_pb(failed))


def failed_to_pb(failed: RequestFailed) -> types_pb2.Error:
    return types_pb2.Error(
        code=failed.code, message=failed.message, retryable=failed.retryable, retry_after_s=failed.retry_after_s
    )


def failed_from_pb(wire: types_pb2.Error) -> RequestFailed:
    return RequestFailed(wire.code, wire.message, wire.retryable, wire.retry_after_s)


def usage_to_pb(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached=cached_tokens_to_pb(usage.cached),
    )


def usage_from_pb(wire: types_pb2.Usage) -> Usage:
    return Usage(wire.prompt_tokens, wire.completion_tokens, cached_tokens_from_pb(wire.cached))


def timing_to_pb(timing: Timing) -> types_pb2.Timing:
    return types_pb2.Timing(
        queue_s=timing.queue_s,
        first_token_s=timing.first_token_s,
        total_s=timing.total_s,
        prefill_s=timing.prefill_s,
        handoff_s=timing.handoff_s,
    )


def timing_from_pb(wire: types_pb2.Timing) -> Timing:
    return Timing(wire.queue_s, wire.first_token_s, wire.total_s, wire.prefill_s, wire.handoff_s)


def _finished_to_pb(event: RequestFinished) -> inference_pb2.RequestFinished:
    return inference_pb2.RequestFinished(
        reason=finish_reason_to_pb(event.reason),
        usage=usage_to_pb(event.usage),
        timing=timing_to_pb(event.timing),
        prefill_node=event.prefill_node,
        decode_node=event.decode_node,
        handoff_bytes=event.handoff_bytes,
        stop_string=event.stop_string,
        retries=event.retries,
        prefix_hash=event.prefix_hash,
        from_response_cache=event.from_response_cache,
    )


def _finished_from_pb(wire: inference_pb2.RequestFinished) -> RequestFinished:
    return RequestFinished(
        reason=finish_reason_from_pb(wire.reason),
        usage=usage_from_pb(wire.usage),
        timing=timing_from_pb(wire.timing),
        prefill_node=wire.prefill_node,
        decode_node=wire.decode_node,
        handoff_bytes=wire.handoff_bytes,
        stop_string=wire.stop_string,
        retries=wire.retries,
        prefix_hash=wire.prefix_hash,
        from_response_cache=wire.from_response_cache,
    )


def listed_model_to_pb(model: ListedModel) -> inference_pb2.ListedModel:
    info = model_info_to_pb(model.info) if model.info else None
    return inference_pb2.ListedModel(name=model.name, model=info, ready=model.ready)


def listed_model_from_pb(wire: inference_pb2.ListedModel) -> ListedModel:
    info = model_info_from_pb(wire.model) if wire.HasField("model") else None
    return ListedModel(wire.name, info, wire.ready)
