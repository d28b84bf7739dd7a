"""Protobuf messages to our dataclasses and back: `x_to_pb` and `x_from_pb` for every message nodes exchange.

What comes from the wire is checked here for what its type cannot hold: sizes, ranges, unknown enum values. A violation
is an InvalidRequestError. An unset message field becomes its dataclass's default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar, get_args

from google.protobuf.message import DecodeError, Message

from kvrelay import errors, types
from kvrelay.errors import InvalidRequestError, KVRelayError
from kvrelay.kv.layout import AXES, KVLayout, ModelInfo, NodeInfo
from kvrelay.pb import cluster_pb2, decode_pb2, kvstore_pb2, prefill_pb2, types_pb2
from kvrelay.types import InstanceId, RequestId, ReservationId, Role, Tier

M = TypeVar("M", bound=Message)

MAX_ID_CHARS = 128
MAX_SALT_BYTES = 64
CHECKSUM_BYTES = 16

_ROLES = {
    Role.COORDINATOR: types_pb2.ROLE_COORDINATOR,
    Role.PREFILL_NODE: types_pb2.ROLE_PREFILL_NODE,
    Role.DECODE_NODE: types_pb2.ROLE_DECODE_NODE,
    Role.KVSTORE: types_pb2.ROLE_KVSTORE,
}
_REASONS = {
    types.FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_TIERS = {
    Tier.NONE: kvstore_pb2.TIER_NONE,
    Tier.MEMORY: kvstore_pb2.TIER_MEMORY,
    Tier.DISK: kvstore_pb2.TIER_DISK,
}
_ROLES_FROM_PB = {wire: role for role, wire in _ROLES.items()}
_REASONS_FROM_PB = {wire: reason for reason, wire in _REASONS.items()}
_TIERS_FROM_PB = {wire: tier for tier, wire in _TIERS.items()}


def _error_classes(root: type[KVRelayError]) -> Iterable[type[KVRelayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_classes(child)


_ERRORS_BY_CODE = {cls.code: cls for cls in _error_classes(KVRelayError) if cls.__module__ == errors.__name__}


def parse(cls: type[M], payload: bytes | memoryview) -> M:
    """A message from its bytes; raises InvalidRequestError."""
    try:
        return cls.FromString(bytes(payload))
    except DecodeError as error:
        raise InvalidRequestError(f"{len(payload)} bytes that are no {cls.DESCRIPTOR.name}") from error


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


# Errors


def error_to_pb(error: KVRelayError, *, message: str | None = None) -> types_pb2.Error:
    """`message` replaces the error's own, for doors that bound its length."""
    return types_pb2.Error(
        code=error.code,
        message=error.message if message is None else message,
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
    )


def error_from_pb(wire: types_pb2.Error) -> KVRelayError:
    """A code that is not known here gives a KVRelayError that carries it."""
    error = _ERRORS_BY_CODE.get(wire.code, KVRelayError)(wire.message, retry_after_s=wire.retry_after_s)
    if error.code != wire.code:
        error.code, error.retryable = wire.code, wire.retryable
    return error


# Enums


def role_to_pb(role: Role) -> types_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_pb(wire: types_pb2.Role.ValueType) -> Role:
    _check(wire in _ROLES_FROM_PB, f"role {wire} is unknown")
    return _ROLES_FROM_PB[wire]


def finish_reason_to_pb(reason: types.FinishReason) -> types_pb2.FinishReason.ValueType:
    return _REASONS[reason]


def finish_reason_from_pb(wire: types_pb2.FinishReason.ValueType) -> types.FinishReason:
    _check(wire in _REASONS_FROM_PB, f"finish reason {wire} is unknown")
    return _REASONS_FROM_PB[wire]


def tier_to_pb(tier: Tier) -> kvstore_pb2.Tier.ValueType:
    """A store's tiers; raises KeyError for DEVICE, which is no store's."""
    return _TIERS[tier]


def tier_from_pb(wire: kvstore_pb2.Tier.ValueType) -> Tier:
    _check(wire in _TIERS_FROM_PB, f"tier {wire} is unknown")
    return _TIERS_FROM_PB[wire]


# Requests and tokens

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


def sampling_params_to_pb(params: types.SamplingParams) -> types_pb2.SamplingParams:
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
    return wire


def sampling_params_from_pb(wire: types_pb2.SamplingParams) -> types.SamplingParams:
    """Ranges are for `SamplingParams.validate`, which knows the vocabulary."""
    return types.SamplingParams(
        logit_bias=dict(wire.logit_bias),
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(wire.stop_token_ids),
        stop=tuple(wire.stop),
        **{name: getattr(wire, name) for name in _OPTIONAL_SAMPLING if wire.HasField(name)},
    )


def step_logprobs_to_pb(logprobs: types.StepLogprobs) -> types_pb2.StepLogprobs:
    return types_pb2.StepLogprobs(
        chosen=_token_logprob_to_pb(logprobs.chosen), top=[_token_logprob_to_pb(entry) for entry in logprobs.top]
    )


def step_logprobs_from_pb(wire: types_pb2.StepLogprobs) -> types.StepLogprobs:
    return types.StepLogprobs(
        chosen=_token_logprob_from_pb(wire.chosen), top=tuple(_token_logprob_from_pb(entry) for entry in wire.top)
    )


def _token_logprob_to_pb(entry: types.TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob)


def _token_logprob_from_pb(wire: types_pb2.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(wire.token_id, wire.logprob)


def cached_tokens_to_pb(cached: types.CachedTokens) -> types_pb2.CachedTokens:
    return types_pb2.CachedTokens(device=cached.device, memory=cached.memory, disk=cached.disk)


def cached_tokens_from_pb(wire: types_pb2.CachedTokens) -> types.CachedTokens:
    return types.CachedTokens(wire.device, wire.memory, wire.disk)


def node_request_to_pb(request: types.NodeRequest) -> types_pb2.NodeRequest:
    return types_pb2.NodeRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=sampling_params_to_pb(request.sampling),
        tenant_salt=request.tenant_salt,
    )


def node_request_from_pb(wire: types_pb2.NodeRequest) -> types.NodeRequest:
    """Token ids and sampling are for the node to check, which knows the vocabulary."""
    check_request_id(wire.request_id)
    num_tokens = len(wire.token_ids)
    _check(num_tokens > 0, "token_ids is empty; send at least one token")
    _check(
        1 <= wire.num_prompt_tokens <= num_tokens,
        f"num_prompt_tokens is {wire.num_prompt_tokens}; allowed is [1, {num_tokens}]",
    )
    _check(
        len(wire.tenant_salt) <= MAX_SALT_BYTES,
        f"tenant_salt has {len(wire.tenant_salt)} bytes; at most {MAX_SALT_BYTES} are allowed",
    )
    return types.NodeRequest(
        RequestId(wire.request_id),
        tuple(wire.token_ids),
        wire.num_prompt_tokens,
        sampling_params_from_pb(wire.sampling),
        wire.tenant_salt,
    )


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError unless it is 1 to 128 printable ASCII characters."""
    ok = 1 <= len(request_id) <= MAX_ID_CHARS and request_id.isascii() and request_id.isprintable()
    _check(ok, f"a request id is 1 to {MAX_ID_CHARS} printable ASCII characters, not {request_id[:MAX_ID_CHARS]!r}")


# Nodes


def kv_layout_to_pb(layout: KVLayout) -> types_pb2.KVLayout:
    return types_pb2.KVLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        axes=layout.axes,
    )


def kv_layout_from_pb(wire: types_pb2.KVLayout) -> KVLayout:
    _check(wire.axes == AXES, f"KV layout: axes are {wire.axes!r}; allowed is {AXES!r}")
    return KVLayout(wire.num_layers, wire.num_kv_heads, wire.head_dim, wire.dtype, wire.block_tokens)


def model_info_to_pb(model: ModelInfo) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        layout=kv_layout_to_pb(model.layout),
        dtype=model.dtype,
        attention_backend=model.attention_backend,
    )


def model_info_from_pb(wire: types_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=wire.name,
        fingerprint=wire.fingerprint,
        architecture=wire.architecture,
        max_model_len=wire.max_model_len,
        vocab_size=wire.vocab_size,
        eos_token_ids=tuple(wire.eos_token_ids),
        layout=kv_layout_from_pb(wire.layout),
        dtype=wire.dtype,
        attention_backend=wire.attention_backend,
    )


def node_info_to_pb(info: NodeInfo) -> cluster_pb2.NodeJoined:
    return cluster_pb2.NodeJoined(
        role=role_to_pb(info.role),
        instance_id=info.instance_id,
        address=info.address,
        model=model_info_to_pb(info.model) if info.model else None,
        protocol_version=info.protocol_version,
    )


def node_info_from_pb(wire: cluster_pb2.NodeJoined) -> NodeInfo:
    _check(0 < len(wire.instance_id) <= MAX_ID_CHARS, f"an instance id has 1 to {MAX_ID_CHARS} characters")
    _check(bool(wire.address), "a node has to name the address it answers on")
    return NodeInfo(
        role_from_pb(wire.role),
        InstanceId(wire.instance_id),
        wire.address,
        model_info_from_pb(wire.model) if wire.HasField("model") else None,
        wire.protocol_version,
    )


def block_counts_to_pb(counts: types.BlockCounts) -> cluster_pb2.BlockCounts:
    return cluster_pb2.BlockCounts(
        total=counts.total, free=counts.free, reserved=counts.reserved, held=counts.held, cached=counts.cached
    )


def block_counts_from_pb(wire: cluster_pb2.BlockCounts) -> types.BlockCounts:
    return types.BlockCounts(wire.total, wire.free, wire.reserved, wire.held, wire.cached)


def node_status_to_pb(status: types.NodeStatus) -> cluster_pb2.NodeStatus:
    return cluster_pb2.NodeStatus(
        ready=status.ready,
        draining=status.draining,
        blocks=block_counts_to_pb(status.blocks),
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_slots_free=status.num_slots_free,
        num_reservations=status.num_reservations,
        memory_bytes=status.memory_bytes,
        disk_bytes=status.disk_bytes,
    )


def node_status_from_pb(wire: cluster_pb2.NodeStatus) -> types.NodeStatus:
    return types.NodeStatus(
        ready=wire.ready,
        draining=wire.draining,
        blocks=block_counts_from_pb(wire.blocks),
        num_running=wire.num_running,
        num_waiting=wire.num_waiting,
        num_slots_free=wire.num_slots_free,
        num_reservations=wire.num_reservations,
        memory_bytes=wire.memory_bytes,
        disk_bytes=wire.disk_bytes,
    )


# Prefill


def handoff_target_to_pb(target: types.HandoffTarget) -> prefill_pb2.HandoffTarget:
    return prefill_pb2.HandoffTarget(
        address=target.address,
        instance_id=target.instance_id,
        reservation_id=target.reservation_id,
        attempt=target.attempt,
        first_block=target.first_block,
    )


def handoff_target_from_pb(wire: prefill_pb2.HandoffTarget) -> types.HandoffTarget:
    _check(bool(wire.address and wire.reservation_id), "a handoff target needs an address and a reservation id")
    return types.HandoffTarget(
        wire.address,
        InstanceId(wire.instance_id),
        ReservationId(wire.reservation_id),
        wire.attempt,
        wire.first_block,
    )


def prefill_request_to_pb(request: types.NodeRequest, target: types.HandoffTarget | None) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request=node_request_to_pb(request), target=handoff_target_to_pb(target) if target else None
    )


def prefill_request_from_pb(
    wire: prefill_pb2.PrefillRequest,
) -> tuple[types.NodeRequest, types.HandoffTarget | None]:
    target = handoff_target_from_pb(wire.target) if wire.HasField("target") else None
    return node_request_from_pb(wire.request), target


def prefill_event_to_pb(event: types.PrefillStarted | types.PrefillFinished) -> prefill_pb2.PrefillEvent:
    cached = cached_tokens_to_pb(event.cached)
    if isinstance(event, types.PrefillStarted):
        return prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(cached=cached))
    logprobs = event.first_token.logprobs
    finished = prefill_pb2.PrefillFinished(
        first_token_id=event.first_token.token_id,
        logprobs=step_logprobs_to_pb(logprobs) if logprobs else None,
        cached=cached,
        compute_s=event.compute_s,
        handoff_s=event.handoff_s,
        handoff_bytes=event.handoff_bytes,
    )
    return prefill_pb2.PrefillEvent(finished=finished)


def prefill_event_from_pb(wire: prefill_pb2.PrefillEvent) -> types.PrefillStarted | types.PrefillFinished:
    if wire.WhichOneof("event") == "started":
        return types.PrefillStarted(cached_tokens_from_pb(wire.started.cached))
    _check(wire.WhichOneof("event") == "finished", "a PrefillEvent that says nothing")
    finished = wire.finished
    return types.PrefillFinished(
        _first_token(finished),
        cached_tokens_from_pb(finished.cached),
        finished.compute_s,
        finished.handoff_s,
        finished.handoff_bytes,
    )


def _first_token(wire: prefill_pb2.PrefillFinished | decode_pb2.HandoffEnd) -> types.GeneratedToken:
    logprobs = step_logprobs_from_pb(wire.logprobs) if wire.HasField("logprobs") else None
    return types.GeneratedToken(wire.first_token_id, logprobs)


# Decode


def reserve_request_to_pb(request: types.NodeRequest, num_tokens: int) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(request=node_request_to_pb(request), num_tokens=num_tokens)


def reserve_request_from_pb(wire: decode_pb2.ReserveRequest) -> tuple[types.NodeRequest, int]:
    request = node_request_from_pb(wire.request)
    _check(
        wire.num_tokens >= len(request.token_ids),
        f"num_tokens is {wire.num_tokens}, fewer than the request's {len(request.token_ids)} tokens",
    )
    return request, wire.num_tokens


def reservation_granted_to_pb(granted: types.ReservationGranted) -> decode_pb2.ReserveReply:
    return decode_pb2.ReserveReply(
        reservation_id=granted.reservation_id,
        instance_id=granted.instance_id,
        num_cached_blocks=granted.num_cached_blocks,
        lease_s=granted.lease_s,
    )


def reservation_granted_from_pb(wire: decode_pb2.ReserveReply) -> types.ReservationGranted:
    return types.ReservationGranted(
        ReservationId(wire.reservation_id), InstanceId(wire.instance_id), wire.num_cached_blocks, wire.lease_s
    )


def tokens_to_pb(
    tokens: Iterable[types.GeneratedToken],
) -> tuple[list[int], list[types_pb2.StepLogprobs]]:
    """Ids, and log-probabilities: one for each id, or none at all. For TokensDecoded and TokensGenerated."""
    ids, logprobs = [], []
    for token in tokens:
        ids.append(token.token_id)
        if token.logprobs is not None:
            logprobs.append(step_logprobs_to_pb(token.logprobs))
    _check(len(logprobs) in (0, len(ids)), "some tokens of one event have log-probabilities and some have none")
    return ids, logprobs


def tokens_from_pb(
    token_ids: Iterable[int], logprobs: Iterable[types_pb2.StepLogprobs]
) -> tuple[types.GeneratedToken, ...]:
    ids, steps = tuple(token_ids), [step_logprobs_from_pb(wire) for wire in logprobs]
    if not steps:
        return tuple(types.GeneratedToken(token_id) for token_id in ids)
    _check(len(steps) == len(ids), f"{len(ids)} token ids came with {len(steps)} log-probabilities")
    return tuple(map(types.GeneratedToken, ids, steps))


def decode_event_to_pb(event: types.TokensDecoded | types.DecodeFinished) -> decode_pb2.DecodeEvent:
    if isinstance(event, types.TokensDecoded):
        ids, logprobs = tokens_to_pb(event.tokens)
        return decode_pb2.DecodeEvent(tokens=decode_pb2.TokensDecoded(token_ids=ids, logprobs=logprobs))
    finished = decode_pb2.DecodeFinished(
        reason=finish_reason_to_pb(event.reason),
        cached=cached_tokens_to_pb(event.cached),
        compute_s=event.compute_s,
    )
    return decode_pb2.DecodeEvent(finished=finished)


def decode_event_from_pb(wire: decode_pb2.DecodeEvent) -> types.TokensDecoded | types.DecodeFinished:
    if wire.WhichOneof("event") == "tokens":
        _check(len(wire.tokens.token_ids) > 0, "a TokensDecoded event without tokens")
        return types.TokensDecoded(tokens_from_pb(wire.tokens.token_ids, wire.tokens.logprobs))
    _check(wire.WhichOneof("event") == "finished", "a DecodeEvent that says nothing")
    finished = wire.finished
    return types.DecodeFinished(
        finish_reason_from_pb(finished.reason), cached_tokens_from_pb(finished.cached), finished.compute_s
    )


# Payloads of a handoff's control frames


def handoff_begin_to_bytes(begin: types.HandoffBegin) -> bytes:
    return decode_pb2.HandoffBegin(
        reservation_id=begin.reservation_id,
        instance_id=begin.instance_id,
        attempt=begin.attempt,
        model_fingerprint=begin.model_fingerprint,
        layout_fingerprint=begin.layout_fingerprint,
        first_block=begin.first_block,
        num_blocks=begin.num_blocks,
    ).SerializeToString()


def handoff_begin_from_bytes(payload: bytes | memoryview) -> types.HandoffBegin:
    wire = parse(decode_pb2.HandoffBegin, payload)
    return types.HandoffBegin(
        ReservationId(wire.reservation_id),
        InstanceId(wire.instance_id),
        wire.attempt,
        wire.model_fingerprint,
        wire.layout_fingerprint,
        wire.first_block,
        wire.num_blocks,
    )


def handoff_end_to_bytes(end: types.HandoffEnd) -> bytes:
    logprobs = end.first_token.logprobs
    return decode_pb2.HandoffEnd(
        num_blocks=end.num_blocks,
        checksum=end.checksum,
        first_token_id=end.first_token.token_id,
        logprobs=step_logprobs_to_pb(logprobs) if logprobs else None,
    ).SerializeToString()


def handoff_end_from_bytes(payload: bytes | memoryview) -> types.HandoffEnd:
    wire = parse(decode_pb2.HandoffEnd, payload)
    _check(
        len(wire.checksum) == CHECKSUM_BYTES,
        f"a handoff's checksum has {CHECKSUM_BYTES} bytes, not {len(wire.checksum)}",
    )
    return types.HandoffEnd(wire.num_blocks, wire.checksum, _first_token(wire))


def blocks_received_to_bytes(received: types.BlocksReceived) -> bytes:
    return decode_pb2.ReceiveEvent(
        num_blocks_received=received.num_blocks, committed=received.committed
    ).SerializeToString()


def blocks_received_from_bytes(payload: bytes | memoryview) -> types.BlocksReceived:
    wire = parse(decode_pb2.ReceiveEvent, payload)
    return types.BlocksReceived(wire.num_blocks_received, wire.committed)
