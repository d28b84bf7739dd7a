"""What is remembered of requests, and for how long, in virtual time."""

from __future__ import annotations

import pytest

from coordinator.explain import EndedRequests
from coordinator.lifetime import Edge, Lifetime
from coordinator.steps import MAX_DETAIL_CHARS, Steps
from kvrelay.explanation import Explanation, LifeStep
from kvrelay.inference import Timing, Usage
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
