"""Messages of prefill.proto to our dataclasses and back."""

from __future__ import annotations

from kvrelay.messages import HandoffTarget, NodeRequest, PrefillFinished, PrefillStarted
from kvrelay.pb import prefill_pb2
from kvrelay.rpc.convert_types import (
    cached_tokens_from_pb,
    cached_tokens_to_pb,
    check,
    first_token_from_pb,
    node_request_from_pb,
    node_request_to_pb,
    step_logprobs_to_pb,
)
from kvrelay.types import InstanceId, ReservationId


def handoff_target_to_pb(target: HandoffTarget) -> prefill_pb2.HandoffTarget:
    return prefill_pb2.HandoffTarget(
        address=target.address,
        instance_id=target.instance_id,
        reservation_id=target.reservation_id,
        attempt=target.attempt,
        first_block=target.first_block,
    )


def handoff_target_from_pb(wire: prefill_pb2.HandoffTarget) -> HandoffTarget:
    check(bool(wire.address and wire.reservation_id), "a handoff target needs an address and a reservation id")
    return HandoffTarget(
        wire.address,
        InstanceId(wire.instance_id),
        ReservationId(wire.reservation_id),
        wire.attempt,
        wire.first_block,
    )


def prefill_request_to_pb(request: NodeRequest, target: HandoffTarget | None) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request=node_request_to_pb(request), target=handoff_target_to_pb(target) if target else None
    )


def prefill_request_from_pb(
    wire: prefill_pb2.PrefillRequest,
) -> tuple[NodeRequest, HandoffTarget | None]:
    target = handoff_target_from_pb(wire.target) if wire.HasField("target") else None
    return node_request_from_pb(wire.request), target


def prefill_event_to_pb(event: PrefillStarted | PrefillFinished) -> prefill_pb2.PrefillEvent:
    cached = cached_tokens_to_pb(event.cached)
    if isinstance(event, PrefillStarted):
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


def prefill_event_from_pb(wire: prefill_pb2.PrefillEvent) -> PrefillStarted | PrefillFinished:
    if wire.WhichOneof("event") == "started":
        return PrefillStarted(cached_tokens_from_pb(wire.started.cached))
    check(wire.WhichOneof("event") == "finished", "a PrefillEvent that says nothing")
    finished = wire.finished
    return PrefillFinished(
        first_token_from_pb(finished),
        cached_tokens_from_pb(finished.cached),
        finished.compute_s,
        finished.handoff_s,
        finished.handoff_bytes,
    )
