"""Explanations to the wire and back."""

from __future__ import annotations

from kvrelay.explanation import Explanation, ForecastOutcome, LifeStep
from kvrelay.inference import RequestFailed, Timing, Usage
from kvrelay.pb import inference_pb2
from kvrelay.rpc.convert_explain import explanation_from_pb, explanation_to_pb
from kvrelay.types import CachedTokens, RequestId

FULL = Explanation(
    request_id=RequestId("r"),
    tenant="acme",
    model="m",
    state="failed",
    usage=Usage(100, 7, CachedTokens(1, 2, 3)),
    timing=Timing(0.125, 0.25, 0.5, 0.75, 1.5),
    steps=(LifeStep(0.0, "accepted", "8 prompt tokens"), LifeStep(0.5, "failed")),
    error=RequestFailed("unavailable", "gone", retryable=True, retry_after_s=2.0),
    prefill_node="p:1",
    decode_node="d:2",
    computed_on_decode=True,
    num_blocks=13,
    handoff_bytes=4096,
    retries=2,
    forecast=ForecastOutcome(0.5, 0.25, 0.125, 0.0625),
    considered=("a", "b"),
)


def test_round_trip() -> None:
    wire = inference_pb2.ExplainReply.FromString(explanation_to_pb(FULL).SerializeToString())
    assert explanation_from_pb(wire) == FULL
    bare = Explanation(RequestId("r"), "acme", "m", "waiting", Usage(1, 0), Timing())
    assert explanation_from_pb(explanation_to_pb(bare)) == bare


def test_every_field_of_the_message_is_said() -> None:
    said = {field.name for field, _ in explanation_to_pb(FULL).ListFields()}
    assert said == set(inference_pb2.ExplainReply.DESCRIPTOR.fields_by_name)
