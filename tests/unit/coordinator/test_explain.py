"""What is remembered of requests, and for how long, in virtual time."""

from __future__ import annotations

import pytest

from coordinator.answer import Answer
from coordinator.calibration import PlacedForecast, Way
from coordinator.explain import EndedRequests, Life
from coordinator.lifetime import Edge, Lifetime
from coordinator.request import AcceptedRequest, RequestState
from coordinator.steps import MAX_DETAIL_CHARS, Steps
from coordinator.tenants import CacheScope
from kvrelay.cluster import ModelInfo
from kvrelay.explanation import Explanation, ForecastOutcome, LifeStep
from kvrelay.inference import RequestFailed, Timing, Usage
from kvrelay.kv.layout import KVLayout
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import RequestId
from tests.support.manual_clock import ManualClock


def explanation(request_id: str, tenant: str = "a", state: str = "finished") -> Explanation:
    return Explanation(RequestId(request_id), tenant, "m", state, Usage(1, 1), Timing())


def test_the_last_ones_are_known_to_their_tenants() -> None:
    ended = EndedRequests(max_ended=2)
    for number in range(3):
        ended.add(explanation(f"r{number}"), now=float(number))
    found = [ended.find(RequestId(f"r{number}"), "a", now=3.0) for number in range(3)]
    assert found == [None, explanation("r1"), explanation("r2")]
    assert ended.find(RequestId("r2"), "b", now=3.0) is None


def test_they_are_known_for_ten_minutes() -> None:
    ended = EndedRequests()
    ended.add(explanation("early"), now=0.0)
    ended.add(explanation("late"), now=300.0)
    assert ended.find(RequestId("early"), "a", now=599.9) is not None
    assert ended.find(RequestId("early"), "a", now=600.0) is None
    assert ended.find(RequestId("late"), "a", now=600.0) is not None
    assert len(ended) == 1


def test_one_under_the_same_id_takes_the_place_of_the_tenants_older_one_only() -> None:
    ended = EndedRequests()
    ended.add(explanation("r", state="failed"), now=0.0)
    ended.add(explanation("r", tenant="b"), now=1.0)
    ended.add(explanation("r", state="finished"), now=2.0)
    assert len(ended) == 2
    found = ended.find(RequestId("r"), "a", now=599.0)
    assert found is not None
    assert found.state == "finished"
    assert ended.find(RequestId("r"), "a", now=601.0) is not None  # counted from its own end
    assert ended.find(RequestId("r"), "b", now=601.0) is None


def test_the_oldest_and_the_newest_steps_are_kept() -> None:
    clock = ManualClock(100.0)
    steps = Steps(RequestId("r"), accepted_at=100.0, clock=clock)
    lifetime = Lifetime(steps.take)
    lifetime.take(Edge.ACCEPTED, "8 prompt tokens")
    for number in range(100):
        clock.now += 1.0
        lifetime.take(Edge.TRIED)
        lifetime.take(Edge.REFUSED, f"no room {number}")
    kept = steps.kept()
    assert len(kept) == 64
    assert kept[:3] == (
        LifeStep(0.0, "accepted", "8 prompt tokens"),
        LifeStep(1.0, "tried"),
        LifeStep(1.0, "refused", "no room 0"),
    )
    assert kept[31].at_s == 16.0
    assert kept[32] == LifeStep(85.0, "tried")
    assert kept[63] == LifeStep(100.0, "refused", "no room 99")


def test_a_long_detail_is_cut() -> None:
    steps = Steps(RequestId("r"), 0.0, clock=lambda: 0.0)
    Lifetime(steps.take).take(Edge.ACCEPTED, "x" * 10_000)
    assert steps.kept()[0].detail == "x" * MAX_DETAIL_CHARS


def test_every_edge_is_a_line_of_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="coordinator.steps"):
        Lifetime(Steps(RequestId("mine"), 0.0, clock=lambda: 1.5).take).take(Edge.ACCEPTED, "8 prompt tokens")
    said = [record.getMessage() for record in caplog.records if record.name == "coordinator.steps"]
    assert said == ["mine: accepted after 1.500 s 8 prompt tokens"]


class NoText:
    def token_bytes(self, token_id: int) -> bytes:
        return b""


class OneFlow:
    """What Life looks at of a flow."""

    def __init__(self) -> None:
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=2)
        model = ModelInfo("m", "aa", "llama", 100, 300, (2,), layout, "float32", "plain")
        sampling = SamplingParams(max_tokens=9, seed=9)
        scope = CacheScope(b"s", "acme")
        accepted = AcceptedRequest(RequestId("r"), RequestId("r#1"), (5, 6, 7), sampling, model, scope)
        self.state = RequestState(accepted, Answer(NoText(), sampling, (2,)), 10.0)
        self.lifetime = Lifetime(self.state.steps.take)

    def explain(self, last_token_at: float | None = None, end: RequestFailed | None = None) -> Explanation:
        return Life([self], "m", end, last_token_at).explain(20.0)  # type: ignore[list-item]


def test_what_was_predicted_beside_what_came() -> None:
    flow = OneFlow()
    assert flow.explain().forecast == ForecastOutcome()
    flow.state.placed_forecast = PlacedForecast(Way.HANDOFF, worked_out_s=0.25, ttft_s=0.5, itl_s=0.125, at=11.0)
    assert flow.explain().forecast == ForecastOutcome(1.5, 0.0, 0.125, 0.0)
    flow.state.account.first_token_at = 12.0
    flow.state.answer.add([GeneratedToken(8)] * 5)
    assert flow.explain(last_token_at=14.0).forecast == ForecastOutcome(1.5, 2.0, 0.125, 0.5)
    of_a_resume = PlacedForecast(Way.HANDOFF, worked_out_s=0.25, ttft_s=0.5, itl_s=0.25, at=15.0)
    flow.state.placed_forecast = of_a_resume
    assert flow.explain(last_token_at=14.0).forecast == ForecastOutcome(0.0, 2.0, 0.25, 0.5)


def test_blocks_are_those_set_aside_or_the_more_that_it_grew_into() -> None:
    flow = OneFlow()
    assert flow.explain().num_blocks == 0
    flow.state.account.decode_node, flow.state.account.num_blocks = "d:1", 3
    assert flow.explain().num_blocks == 3
    flow.state.answer.add([GeneratedToken(8)] * 5)
    assert flow.explain().num_blocks == 4


def test_a_state_is_that_of_its_stage_until_it_ends() -> None:
    flow = OneFlow()
    flow.lifetime.take(Edge.ACCEPTED)
    assert flow.explain().state == "waiting"
    flow.lifetime.take(Edge.TRIED)
    flow.lifetime.take(Edge.TAIL_SENT)
    assert flow.explain().state == "running"
    for code, state in (("cancelled", "cancelled"), ("unavailable", "failed")):
        end = RequestFailed(code, "why", retryable=False)
        told = flow.explain(end=end)
        assert (told.state, told.error) == (state, end)
