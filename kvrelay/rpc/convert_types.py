"""Messages of types.proto to our dataclasses and back, and what the other `convert_*` modules check with.

There is one such module for each proto file, with `x_to_pb` and `x_from_pb` for every message. What comes from the wire
is checked there for what its type cannot hold: sizes, ranges, unknown enum values. A violation is an
InvalidRequestError. An unset message field becomes its dataclass's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar, get_args

from google.protobuf.message import DecodeError, Message

from kvrelay.errors import InvalidRequestError
from kvrelay.messages import NodeRequest
from kvrelay.pb import decode_pb2, prefill_pb2, types_pb2
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.types import DEFAULT_TENANT, CachedTokens, FinishReason, RequestId, check_tenant_name, check_ttl_s

M = TypeVar("M", bound=Message)

MAX_ID_CHARS = 128
MAX_SALT_BYTES = 64

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_REASONS_FROM_PB = {wire: reason for reason, wire in _REASONS.items()}


def parse(cls: type[M], payload: bytes | memoryview) -> M:
    """A message from its bytes; raises InvalidRequestError."""
    try:
        return cls.FromString(bytes(payload))
    except DecodeError as error:
        raise InvalidRequestError(f"{len(payload)} bytes that are no {cls.DESCRIPTOR.name}") from error


def check(ok: bool, message: str) -> None:
    """Raises InvalidRequestError with `message` unless ok."""
    if not ok:
        raise InvalidRequestError(message)


def finish_reason_to_pb(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    return _REASONS[reason]


def finish_reason_from_pb(wire: types_pb2.FinishReason.ValueType) -> FinishReason:
    check(wire in _REASONS_FROM_PB, f"finish reason {wire} is unknown")
    return _REASONS_FROM_PB[wire]


_OptionalSampling = Literal[
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "logprobs",
]

_OPTIONAL_SAMPLING: tuple[_OptionalSampling, ...] = get_args(_OptionalSampling)


def sampling_params_to_pb(params: SamplingParams) -> types_pb2.SamplingParams:
    wire = types_pb2.SamplingParams(
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        stop=params.stop,
    )
    for name in _OPTIONAL_SAMPLING:
        value = getattr(params, name)
        if value is not None:
            setattr(wire, name, value)
    if params.structured is not None:
        _set_structured(wire, params.structured)
    return wire


def sampling_params_from_pb(wire: types_pb2.SamplingParams) -> SamplingParams:
    """Ranges are for `SamplingParams.validate`, which knows the vocabulary."""
    return SamplingParams(
        logit_bias=dict(wire.logit_bias),
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(wire.stop_token_ids),
        stop=tuple(wire.stop),
        structured=_structured_from_pb(wire),
        **{name: getattr(wire, name) for name in _OPTIONAL_SAMPLING if wire.HasField(name)},
    )


def _set_structured(wire: types_pb2.SamplingParams, structured: StructuredOutput) -> None:
    match structured.kind:
        case StructureKind.JSON_OBJECT:
            wire.json_object.SetInParent()
        case StructureKind.CHOICE:
            wire.choice.texts.extend(structured.choices)
            wire.choice.SetInParent()
        case kind:
            setattr(wire, kind, structured.text)


def _structured_from_pb(wire: types_pb2.SamplingParams) -> StructuredOutput | None:
    name = wire.WhichOneof("structured")
    if name is None:
        return None
    kind = StructureKind(name)
    if kind is StructureKind.JSON_OBJECT:
        return StructuredOutput(kind)
    if kind is StructureKind.CHOICE:
        return StructuredOutput(kind, choices=tuple(wire.choice.texts))
    return StructuredOutput(kind, getattr(wire, name))


def step_logprobs_to_pb(logprobs: StepLogprobs) -> types_pb2.StepLogprobs:
    return types_pb2.StepLogprobs(
        chosen=_token_logprob_to_pb(logprobs.chosen), top=[_token_logprob_to_pb(entry) for entry in logprobs.top]
    )


def step_logprobs_from_pb(wire: types_pb2.StepLogprobs) -> StepLogprobs:
    return StepLogprobs(
        chosen=_token_logprob_from_pb(wire.chosen), top=tuple(_token_logprob_from_pb(entry) for entry in wire.top)
    )


def _token_logprob_to_pb(entry: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob)


def _token_logprob_from_pb(wire: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(wire.token_id, wire.logprob)


def tokens_to_pb(
    tokens: Iterable[GeneratedToken],
) -> tuple[list[int], list[types_pb2.StepLogprobs]]:
    """Ids, and log-probabilities: one for each id, or none at all. For TokensDecoded and TokensGenerated."""
    ids, logprobs = [], []
    for token in tokens:
        ids.append(token.token_id)
        if token.logprobs is not None:
            logprobs.append(step_logprobs_to_pb(token.logprobs))
    check(len(logprobs) in (0, len(ids)), "some tokens of one event have log-probabilities and some have none")
    return ids, logprobs


def tokens_from_pb(token_ids: Sequence[int], logprobs: Sequence[types_pb2.StepLogprobs]) -> tuple[GeneratedToken, ...]:
    if not logprobs:
        return tuple(map(GeneratedToken, token_ids))
    check(len(logprobs) == len(token_ids), f"{len(token_ids)} token ids came with {len(logprobs)} log-probabilities")
    return tuple(map(GeneratedToken, token_ids, map(step_logprobs_from_pb, logprobs)))


def first_token_from_pb(wire: prefill_pb2.PrefillFinished | decode_pb2.HandoffEnd) -> GeneratedToken:
    logprobs = step_logprobs_from_pb(wire.logprobs) if wire.HasField("logprobs") else None
    return GeneratedToken(wire.first_token_id, logprobs)


def cached_tokens_to_pb(cached: CachedTokens) -> types_pb2.CachedTokens:
    return types_pb2.CachedTokens(device=cached.device, memory=cached.memory, disk=cached.disk)


def cached_tokens_from_pb(wire: types_pb2.CachedTokens) -> CachedTokens:
    return CachedTokens(wire.device, wire.memory, wire.disk)


def node_request_to_pb(request: NodeRequest) -> types_pb2.NodeRequest:
    return types_pb2.NodeRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling_params_to_pb(request.sampling),
        tenant_salt=request.tenant_salt,
        tenant=request.tenant,
        cache_ttl_s=request.cache_ttl_s,
    )


def node_request_from_pb(wire: types_pb2.NodeRequest) -> NodeRequest:
    """Token ids and sampling are for the node to check, which knows the vocabulary."""
    check_request_id(wire.request_id)
    num_tokens = len(wire.token_ids)
    check(num_tokens > 0, "token_ids is empty; send at least one token")
    check(
        1 <= wire.num_prompt_tokens <= num_tokens,
        f"num_prompt_tokens is {wire.num_prompt_tokens}; allowed is [1, {num_tokens}]",
    )
    check(
        len(wire.tenant_salt) <= MAX_SALT_BYTES,
        f"tenant_salt has {len(wire.tenant_salt)} bytes; at most {MAX_SALT_BYTES} are allowed",
    )
    cache_ttl_s = wire.cache_ttl_s if wire.HasField("cache_ttl_s") else None
    check_ttl_s("cache_ttl_s", cache_ttl_s)
    return NodeRequest(
        RequestId(wire.request_id),
        tuple(wire.token_ids),
        wire.num_prompt_tokens,
        sampling_params_from_pb(wire.sampling),
        wire.tenant_salt,
        tenant_from_pb(wire.tenant),
        cache_ttl_s,
    )


def tenant_from_pb(name: str) -> str:
    """Empty on the wire is the default tenant. Raises InvalidRequestError."""
    if not name:
        return DEFAULT_TENANT
    check_tenant_name(name)
    return name


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError unless it is 1 to 128 printable ASCII characters."""
    ok = 1 <= len(request_id) <= MAX_ID_CHARS and request_id.isascii() and request_id.isprintable()
    check(ok, f"a request id is 1 to {MAX_ID_CHARS} printable ASCII characters, not {request_id[:MAX_ID_CHARS]!r}")
