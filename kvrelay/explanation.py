"""What a coordinator tells of one request's life, one class per message of inference.proto."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.inference import RequestFailed, Timing, Usage
from kvrelay.types import RequestId

MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class LifeStep:
    """`at_s` after the request was accepted; `edge` as in kvrelay_request_edges_total; `detail` is for people."""

    at_s: float
    edge: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ForecastOutcome:
    """Seconds until the first token, and between two in the mean; 0 where it was not predicted, or has not come."""

    predicted_ttft_s: float = 0.0
    actual_ttft_s: float = 0.0
    predicted_itl_s: float = 0.0
    actual_itl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Nodes, blocks and steps are those of answer 0; usage, handoff_bytes and retries of all. `state` is "waiting",
    "running", "finished", "failed" or "cancelled"; `error` is what ended it where it did not finish."""

    request_id: RequestId
    tenant: str
    model: str
    state: str
    usage: Usage
    timing: Timing
    steps: tuple[LifeStep, ...] = ()
    error: RequestFailed | None = None
    prefill_node: str = ""
    decode_node: str = ""
    computed_on_decode: bool = False
    num_blocks: int = 0
    handoff_bytes: int = 0
    retries: int = 0
    forecast: ForecastOutcome = ForecastOutcome()
    considered: tuple[str, ...] = ()
