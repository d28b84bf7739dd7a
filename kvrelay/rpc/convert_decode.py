"""Messages of decode.proto to our dataclasses and back; a handoff's control payloads to bytes and back."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvrelay.errors import KVRelayError
from kvrelay.messages import (
    AnswersAdvanced,
    AnswersAsked,
    AnswerWanted,
    BlocksReceived,
    DecodeFinished,
    HandoffBegin,
    HandoffEnd,
    NodeRequest,
    ReservationGranted,
)
from kvrelay.pb import decode_pb2
from kvrelay.rpc.convert_errors import error_from_pb, error_to_pb
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
from kvrelay.sampling import GeneratedToken
from kvrelay.types import AnswerHandle, InstanceId, ReservationId

CHECKSUM_BYTES = 16


def reserve_request_to_pb(
    request: NodeRequest, num_tokens: int, num_tokens_now: int = 0, itl_target_s: float = 0.0
) -> decode_pb2.ReserveRequest:
    return decode_pb2.ReserveRequest(
        request=node_request_to_pb(request),
        num_tokens=num_tokens,
        num_tokens_now=num_tokens_now,
        itl_target_s=itl_target_s,
    )


def reserve_request_from_pb(wire: decode_pb2.ReserveRequest) -> tuple[NodeRequest, int, int, float]:
    """The request, the positions it may grow to, those to set aside now (0: as the node's limits say), and the seconds
    that may pass between two of its tokens (0: no bound)."""
    request = node_request_from_pb(wire.request)
    check(
        wire.num_tokens >= len(request.token_ids),
        f"num_tokens is {wire.num_tokens}, fewer than the request's {len(request.token_ids)} tokens",
    )
    check(0 <= wire.itl_target_s < math.inf, f"itl_target_s is {wire.itl_target_s:g}; allowed is at least 0, finite")
    return request, wire.num_tokens, wire.num_tokens_now, wire.itl_target_s


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


def answers_asked_to_pb(asked: AnswersAsked) -> decode_pb2.DecodeRequest:
    wanted = [
        decode_pb2.AnswerWanted(
            handle=one.handle,
            reservation_id=one.reservation_id,
            compute_tail=one.compute_tail,
            timeout_s=one.timeout_s,
        )
        for one in asked.wanted
    ]
    return decode_pb2.DecodeRequest(wanted=wanted, left=asked.left)


def answers_asked_from_pb(wire: decode_pb2.DecodeRequest) -> AnswersAsked:
    """Reservation ids are for the node to check: a wrong one is one answer's error."""
    wanted = [
        AnswerWanted(AnswerHandle(one.handle), ReservationId(one.reservation_id), one.compute_tail, one.timeout_s)
        for one in wire.wanted
    ]
    return AnswersAsked(tuple(wanted), tuple(map(AnswerHandle, wire.left)))


def answers_advanced_to_pb(advanced: AnswersAdvanced) -> decode_pb2.DecodeReply:
    """Tokens without log-probabilities go in two columns: an object for each would be most of the work."""
    handles: list[int] = []
    token_ids: list[int] = []
    with_logprobs = []
    for handle, tokens in advanced.tokens:
        ids, logprobs = tokens_to_pb(tokens)
        if logprobs:
            with_logprobs.append(decode_pb2.AnswerTokens(handle=handle, token_ids=ids, logprobs=logprobs))
        else:
            handles += [handle] * len(ids)
            token_ids += ids
    return decode_pb2.DecodeReply(
        with_logprobs=with_logprobs,
        ended=[_answer_ended_to_pb(handle, end) for handle, end in advanced.ended],
        handles=handles,
        token_ids=token_ids,
    )


def answers_advanced_from_pb(wire: decode_pb2.DecodeReply) -> AnswersAdvanced:
    """The tokens of each answer together; first come the answers without log-probabilities."""
    handles, token_ids = wire.handles, wire.token_ids
    check(len(handles) == len(token_ids), f"{len(token_ids)} token ids came with {len(handles)} handles")
    tokens = _tokens_by_answer(list(map(AnswerHandle, handles)), map(GeneratedToken, token_ids))
    if wire.with_logprobs:
        tokens += map(_answer_tokens_from_pb, wire.with_logprobs)
    return AnswersAdvanced(tuple(tokens), tuple(map(_answer_ended_from_pb, wire.ended)))


def _tokens_by_answer(
    handles: list[AnswerHandle], tokens: Iterable[GeneratedToken]
) -> list[tuple[AnswerHandle, tuple[GeneratedToken, ...]]]:
    """A token goes to the handle at its place."""
    if len(set(handles)) == len(handles):  # as of every step: without a loop of ours
        return list(zip(handles, zip(tokens, strict=True), strict=True))
    found: dict[AnswerHandle, list[GeneratedToken]] = {}
    for handle, token in zip(handles, tokens, strict=True):
        found.setdefault(handle, []).append(token)
    return [(handle, tuple(taken)) for handle, taken in found.items()]


def _answer_tokens_from_pb(wire: decode_pb2.AnswerTokens) -> tuple[AnswerHandle, tuple[GeneratedToken, ...]]:
    check(
        len(wire.token_ids) == len(wire.logprobs) > 0,
        f"{len(wire.token_ids)} token ids came with {len(wire.logprobs)} log-probabilities",
    )
    return AnswerHandle(wire.handle), tokens_from_pb(wire.token_ids, wire.logprobs)


def _answer_ended_to_pb(handle: AnswerHandle, end: DecodeFinished | KVRelayError) -> decode_pb2.AnswerEnded:
    if isinstance(end, KVRelayError):
        return decode_pb2.AnswerEnded(handle=handle, failed=error_to_pb(end))
    finished = decode_pb2.DecodeFinished(
        reason=finish_reason_to_pb(end.reason),
        cached=cached_tokens_to_pb(end.cached),
        compute_s=end.compute_s,
    )
    return decode_pb2.AnswerEnded(handle=handle, finished=finished)


def _answer_ended_from_pb(wire: decode_pb2.AnswerEnded) -> tuple[AnswerHandle, DecodeFinished | KVRelayError]:
    handle, finished = AnswerHandle(wire.handle), wire.finished
    if wire.WhichOneof("end") == "failed":
        return handle, error_from_pb(wire.failed)
    check(wire.HasField("finished"), "an AnswerEnded that does not say how")
    return handle, DecodeFinished(
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
