"""Messages of decode.proto to our dataclasses and back; a handoff's control payloads to bytes and back."""

from __future__ import annotations

from kvrelay.messages import (
    BlocksReceived,
    DecodeFinished,
    HandoffBegin,
    HandoffEnd,
    NodeRequest,
    ReservationGranted,
    TokensDecoded,
)
from kvrelay.pb import decode_pb2
from kvrelay.rpc.convert_types import (
    cached_tokens_from_pb,
    cached_tokens_to_pb,
    check,
    finish_reason_from_pb,
    finish_reason_to_pb,
    first_token_from_pb,
    node_request_from_pb,
    node_request_to_pb,
    parse,
    step_logprobs_to_pb,
    tokens_from_pb,
    tokens_to_pb,
)
from kvrelay.types import InstanceId, ReservationId

CHECKSUM_BYTES = 16


def reserve_request_to_pb(request: NodeRequest, num_tokens: int, num_tokens_now: int = 0) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(
        request=node_request_to_pb(request), num_tokens=num_tokens, num_tokens_now=num_tokens_now
    )


def reserve_request_from_pb(wire: decode_pb2.ReserveRequest) -> tuple[NodeRequest, int, int]:
    """The request, the positions it may grow to, and those to set aside now (0: as the node's limits say)."""
    request = node_request_from_pb(wire.request)
    check(
        wire.num_tokens >= len(request.token_ids),
        f"num_tokens is {wire.num_tokens}, fewer than the request's {len(request.token_ids)} tokens",
    )
    return request, wire.num_tokens, wire.num_tokens_now


def reservation_id_from_pb(text: str) -> ReservationId:
    check(text != "", "reservation id is empty")
    return ReservationId(text)


def reservation_granted_to_pb(granted: ReservationGranted) -> decode_pb2.ReserveReply:
    return decode_pb2.ReserveReply(
        reservation_id=granted.reservation_id,
        instance_id=granted.instance_id,
        num_cached_blocks=granted.num_cached_blocks,
        lease_s=granted.lease_s,
    )


def reservation_granted_from_pb(wire: decode_pb2.ReserveReply) -> ReservationGranted:
    return ReservationGranted(
        ReservationId(wire.reservation_id), InstanceId(wire.instance_id), wire.num_cached_blocks, wire.lease_s
    )


def decode_event_to_pb(event: TokensDecoded | DecodeFinished) -> decode_pb2.DecodeEvent:
    if isinstance(event, TokensDecoded):
        ids, logprobs = tokens_to_pb(event.tokens)
        return decode_pb2.DecodeEvent(tokens=decode_pb2.TokensDecoded(token_ids=ids, logprobs=logprobs))
    finished = decode_pb2.DecodeFinished(
        reason=finish_reason_to_pb(event.reason),
        cached=cached_tokens_to_pb(event.cached),
        compute_s=event.compute_s,
    )
    return decode_pb2.DecodeEvent(finished=finished)


def decode_event_from_pb(wire: decode_pb2.DecodeEvent) -> TokensDecoded | DecodeFinished:
    kind = wire.WhichOneof("event")
    if kind == "tokens":
        tokens = wire.tokens
        taken = tokens_from_pb(tokens.token_ids, tokens.logprobs)
        check(len(taken) > 0, "a TokensDecoded event without tokens")
        return TokensDecoded(taken)
    check(kind == "finished", "a DecodeEvent that says nothing")
    finished = wire.finished
    return DecodeFinished(
        finish_reason_from_pb(finished.reason), cached_tokens_from_pb(finished.cached), finished.compute_s
    )


def handoff_begin_to_bytes(begin: HandoffBegin) -> bytes:
    return decode_pb2.HandoffBegin(
        reservation_id=begin.reservation_id,
        instance_id=begin.instance_id,
        attempt=begin.attempt,
        model_fingerprint=begin.model_fingerprint,
        layout_fingerprint=begin.layout_fingerprint,
        first_block=begin.first_block,
        num_blocks=begin.num_blocks,
    ).SerializeToString()


def handoff_begin_from_bytes(payload: bytes | memoryview) -> HandoffBegin:
    wire = parse(decode_pb2.HandoffBegin, payload)
    return HandoffBegin(
        reservation_id_from_pb(wire.reservation_id),
        InstanceId(wire.instance_id),
        wire.attempt,
        wire.model_fingerprint,
        wire.layout_fingerprint,
        wire.first_block,
        wire.num_blocks,
    )


def handoff_end_to_bytes(end: HandoffEnd) -> bytes:
    logprobs = end.first_token.logprobs
    return decode_pb2.HandoffEnd(
        num_blocks=end.num_blocks,
        checksum=end.checksum,
        first_token_id=end.first_token.token_id,
        logprobs=step_logprobs_to_pb(logprobs) if logprobs else None,
    ).SerializeToString()


def handoff_end_from_bytes(payload: bytes | memoryview) -> HandoffEnd:
    wire = parse(decode_pb2.HandoffEnd, payload)
    check(
        len(wire.checksum) == CHECKSUM_BYTES,
        f"a handoff's checksum has {CHECKSUM_BYTES} bytes, not {len(wire.checksum)}",
    )
    return HandoffEnd(wire.num_blocks, wire.checksum, first_token_from_pb(wire))


def blocks_received_to_bytes(received: BlocksReceived) -> bytes:
    return decode_pb2.ReceiveEvent(
        num_blocks_received=received.num_blocks, committed=received.committed
    ).SerializeToString()


def blocks_received_from_bytes(payload: bytes | memoryview) -> BlocksReceived:
    wire = parse(decode_pb2.ReceiveEvent, payload)
    return BlocksReceived(wire.num_blocks_received, wire.committed)
