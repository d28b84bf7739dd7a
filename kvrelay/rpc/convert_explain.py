"""ExplainReply of inference.proto to our dataclass and back."""

from __future__ import annotations

from kvrelay.explanation import Explanation, ForecastOutcome, LifeStep
from kvrelay.pb import inference_pb2
from kvrelay.rpc.convert_inference import (
    failed_from_pb,
    failed_to_pb,
    timing_from_pb,
    timing_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from kvrelay.types import RequestId


def explanation_to_pb(explanation: Explanation) -> inference_pb2.ExplainReply:
    forecast = explanation.forecast
    return inference_pb2.ExplainReply(
        request_id=explanation.request_id,
        tenant=explanation.tenant,
        model=explanation.model,
        state=explanation.state,
        error=failed_to_pb(explanation.error) if explanation.error else None,
        steps=[
            inference_pb2.LifeStep(at_s=step.at_s, edge=step.edge, detail=step.detail) for step in explanation.steps
        ],
        usage=usage_to_pb(explanation.usage),
        timing=timing_to_pb(explanation.timing),
        prefill_node=explanation.prefill_node,
        decode_node=explanation.decode_node,
        computed_on_decode=explanation.computed_on_decode,
        num_blocks=explanation.num_blocks,
        handoff_bytes=explanation.handoff_bytes,
        retries=explanation.retries,
        forecast=inference_pb2.Forecast(
            predicted_ttft_s=forecast.predicted_ttft_s,
            actual_ttft_s=forecast.actual_ttft_s,
            predicted_itl_s=forecast.predicted_itl_s,
            actual_itl_s=forecast.actual_itl_s,
        ),
        considered=explanation.considered,
    )


def explanation_from_pb(wire: inference_pb2.ExplainReply) -> Explanation:
    forecast = wire.forecast
    return Explanation(
        request_id=RequestId(wire.request_id),
        tenant=wire.tenant,
        model=wire.model,
        state=wire.state,
        usage=usage_from_pb(wire.usage),
        timing=timing_from_pb(wire.timing),
        steps=tuple(LifeStep(step.at_s, step.edge, step.detail) for step in wire.steps),
        error=failed_from_pb(wire.error) if wire.HasField("error") else None,
        prefill_node=wire.prefill_node,
        decode_node=wire.decode_node,
        computed_on_decode=wire.computed_on_decode,
        num_blocks=wire.num_blocks,
        handoff_bytes=wire.handoff_bytes,
        retries=wire.retries,
        forecast=ForecastOutcome(
            predicted_ttft_s=forecast.predicted_ttft_s,
            actual_ttft_s=forecast.actual_ttft_s,
            predicted_itl_s=forecast.predicted_itl_s,
            actual_itl_s=forecast.actual_itl_s,
        ),
        considered=tuple(wire.considered),
    )
