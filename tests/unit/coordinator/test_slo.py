"""What is refused for its targets, and whether it gets in when it comes back as told."""

from __future__ import annotations

import heapq
import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass

import pytest

from coordinator.forecast import Forecast
from coordinator.slo import NO_TARGETS, Prediction, SloAdmission, Targets, targets_of
from coordinator.tenant_policy import TenantPolicy
from kvrelay.errors import InvalidRequestError, OverloadedError
from kvrelay.inference import GenerateRequest


def prediction(
    wait_s: float = 0.0,
    prefill_s: float = 0.25,
    queue_s: float = 0.0,
    itl_s: float = 0.02,
    tokens_per_s: float | None = 1_000.0,
    num_tokens: int = 100,
) -> Prediction:
    forecast = Forecast(ttft_s=queue_s + prefill_s, itl_s=itl_s, queue_s=queue_s, prefill_s=prefill_s)
    return Prediction(wait_s, forecast, tokens_per_s, num_tokens, num_tokens)


def check(
    slo: SloAdmission,
    targets: Targets,
    predicted: Prediction,
    now: float = 0.0,
    *,
    request_id: str = "",
    best_effort: bool = False,
    tenant: str = "a",
) -> bool:
    return slo.check(tenant, request_id, targets, predicted, now, best_effort=best_effort)


def refused(slo: SloAdmission, targets: Targets, predicted: Prediction, **more: object) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        check(slo, targets, predicted, **more)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("targets", "predicted"),
    [
        (NO_TARGETS, prediction(wait_s=100.0, itl_s=9.0)),
        (Targets(ttft_s=1.0), prediction(wait_s=0.75, itl_s=9.0)),
        (Targets(itl_s=0.02), prediction(wait_s=100.0)),
        (Targets(1.0, 0.02), Prediction(0.0, None, None, 100, 100)),
        (Targets(1.0, 0.02), prediction(itl_s=0.0)),
    ],
)
def test_what_can_meet_its_targets_or_is_not_known_not_to_is_let_in(targets: Targets, predicted: Prediction) -> None:
    assert check(SloAdmission(), targets, predicted)


def test_the_refusal_has_prediction_target_and_a_time_to_come_back() -> None:
    heard: list[str] = []
    slo = SloAdmission(heard.append)
    error = refused(slo, Targets(ttft_s=1.0), prediction(wait_s=2.0))
    assert error.message == (
        "the request would get its first token in about 2.2 s, more than the 1 s asked for; "
        "try again in about 1.8 s, or as best effort"
    )
    assert error.retry_after_s == pytest.approx((2.25 - 0.8) * 1.25)
    assert error.retryable
    for _ in range(3):
        slo.note_answer(10.0)
    error = refused(slo, Targets(ttft_s=1.0, itl_s=0.015), prediction())
    assert error.message.startswith("the request would get a token every 20 ms on average, more than the 15 ms asked")
    assert error.retry_after_s == pytest.approx(10.0 * (1 - 0.8 * 15 / 20) * 1.25)
    assert heard == ["ttft", "itl"]


def test_what_no_wait_brings_in_reach_is_told_so_and_no_time() -> None:
    error = refused(SloAdmission(), Targets(ttft_s=0.2), prediction(wait_s=2.0, queue_s=1.0))
    assert error.retry_after_s == 0
    assert not error.retryable
    assert "in about 3.2 s, more than the 0.2 s asked for, 0.25 s of them without any wait" in error.message
    assert "ask for a longer one, or as best effort" in error.message


def test_a_step_that_takes_too_long_by_itself_gets_no_shorter_by_coming_back() -> None:
    slo = SloAdmission()
    slo.note_answer(10.0)
    forecast = Forecast(ttft_s=0.25, itl_s=0.02, prefill_s=0.25, least_itl_s=0.02)
    error = refused(slo, Targets(itl_s=0.015), Prediction(0.0, forecast, 1_000.0, 100, 100))
    assert (error.retry_after_s, error.retryable) == (0, False)
    assert error.message == (
        "the request would get a token every 20 ms on average, more than the 15 ms asked for, with nothing beside it; "
        "ask for a longer one, or as best effort"
    )


def test_a_target_that_the_quickest_node_would_keep_is_not_out_of_reach_for_good() -> None:
    """It is busy now, so the request would go to another, which is slower."""
    slo = SloAdmission()
    slo.note_answer(10.0)
    forecast = Forecast(ttft_s=5.0, itl_s=0.1, prefill_s=5.0, least_itl_s=0.1)
    now = Prediction(0.0, forecast, 1_000.0, 100, 100, quickest_ttft_s=1.0, quickest_itl_s=0.0)
    for targets in (Targets(ttft_s=2.0), Targets(itl_s=0.05)):
        error = refused(slo, targets, now)
        assert error.retryable
        assert error.retry_after_s > 0
    assert not refused(slo, Targets(ttft_s=0.9), now).retryable


def test_best_effort_is_never_refused_and_knows_when_it_is_late() -> None:
    heard: list[str] = []
    slo = SloAdmission(heard.append)
    assert not check(slo, Targets(ttft_s=1.0), prediction(wait_s=2.0), best_effort=True)
    assert check(slo, Targets(ttft_s=1.0), prediction(), best_effort=True)
    assert heard == []


def test_who_was_told_to_come_back_is_kept_room_and_newcomers_are_not() -> None:
    slo, targets = SloAdmission(), Targets(ttft_s=1.0)
    delay_s = refused(slo, targets, prediction(wait_s=2.0), request_id="one").retry_after_s
    just_fits = prediction(wait_s=0.7)
    error = refused(slo, targets, just_fits, now=delay_s, request_id="new")
    assert "0.95 s, too near, with others told to come back before it, to the 1 s asked for" in error.message
    refused(slo, targets, just_fits, now=delay_s, request_id="other tenant's", tenant="b")
    assert check(slo, targets, prediction(wait_s=0.2), delay_s, request_id="newer"), "there is room for both"
    assert check(slo, targets, just_fits, delay_s, request_id="one")


def test_newcomers_keep_out_of_the_way_of_one_that_can_hardly_wait_when_it_has_come() -> None:
    slo, targets = SloAdmission(), Targets(ttft_s=2.0)
    small = {"tokens_per_s": 1_000_000.0, "num_tokens": 1}  # so that what is kept for it takes no time
    long = prediction(queue_s=1.0, prefill_s=1.75, **small)  # type: ignore[arg-type]
    delay_s = refused(slo, targets, long, request_id="long").retry_after_s
    short = prediction(queue_s=0.5, prefill_s=0.25, **small)  # type: ignore[arg-type]
    assert check(slo, targets, short, now=delay_s - 0.6), "it is done before the long one has to begin"
    assert "others told to come back before it" in refused(slo, targets, short, now=delay_s - 0.4).message
    assert check(slo, targets, prediction(prefill_s=1.75), now=delay_s, request_id="long")
    assert check(slo, targets, short, now=delay_s)


def test_of_several_each_is_told_a_later_time() -> None:
    slo, targets = SloAdmission(), Targets(ttft_s=1.0)
    delays = [
        refused(slo, targets, prediction(wait_s=2.0, num_tokens=800), request_id=f"r{number}").retry_after_s
        for number in range(5)
    ]
    steps = [later - earlier for earlier, later in itertools.pairwise(delays)]
    assert steps == pytest.approx([1.0] * 4), "800 tokens at 1,000 a second, and a quarter more"


def test_a_tenant_that_has_had_more_than_one_that_is_refused_keeps_clear_of_two_fifths_of_its_target() -> None:
    slo, targets = SloAdmission(weight_of={"a": 1.0, "b": 3.0, "c": 1.0}.__getitem__), Targets(ttft_s=1.0)
    for tenant, num_tokens in (("a", 100), ("b", 200)):
        assert check(slo, targets, prediction(num_tokens=num_tokens), tenant=tenant)
    refused(slo, targets, prediction(wait_s=2.0), tenant="b", request_id="one")
    later = prediction(wait_s=0.4)
    error = refused(slo, targets, later, now=0.1, tenant="a")
    assert "0.65 s, too near, with tenants that have had less of their share, to the 1 s asked for" in error.message
    assert check(slo, targets, prediction(wait_s=0.3), 0.1, tenant="a")
    assert check(slo, targets, later, 0.1, tenant="b")
    assert check(slo, targets, later, 0.1, tenant="c"), "it has had nothing"


def test_each_tenant_is_told_times_at_the_pace_that_is_due_to_it() -> None:
    weights = {"a": 3.0, "b": 1.0}
    slo, targets = SloAdmission(weight_of=weights.__getitem__), Targets(ttft_s=1.0)
    told = {tenant: list[float]() for tenant in weights}
    for number, tenant in itertools.product(range(3), weights):
        error = refused(slo, targets, prediction(2.0, num_tokens=600), tenant=tenant, request_id=f"r{number}")
        told[tenant].append(error.retry_after_s)
    for tenant, step in (("a", 600 / 750 * 1.25), ("b", 600 / 250 * 1.25)):
        assert told[tenant][2] - told[tenant][1] == pytest.approx(step), tenant


@pytest.mark.parametrize("own", [None, 0.5])
def test_a_request_has_its_own_targets_or_its_tenants(own: float | None) -> None:
    request = GenerateRequest(None, ttft_target_s=own, itl_target_s=own)
    assert targets_of(request, TenantPolicy()) == Targets(own, own)
    assert targets_of(request, TenantPolicy(ttft_s=2.0, itl_s=0.25)) == Targets(own or 2.0, own or 0.25)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_targets_are_numbers_over_zero(value: float) -> None:
    for name in ("ttft_target_s", "itl_target_s"):
        with pytest.raises(
            InvalidRequestError, match=re.escape(f"{name} is {value:g}; allowed is a number of seconds")
        ):
            GenerateRequest(None, **{name: value}).check_targets()  # type: ignore[arg-type]


@pytest.mark.parametrize("share_with_ids", [1.0, 0.5])
def test_at_twice_the_capacity_nine_of_ten_that_come_back_as_told_get_in_and_the_cluster_is_busy(
    share_with_ids: float,
) -> None:
    """A cluster gives 1,000 tokens a second, in order; twice as much is asked for by requests of 20 to 400 tokens that
    want their first token within 2 s. Half of those that are refused come back when told to, the others never."""
    draw = random.Random(7)
    slo, targets = SloAdmission(), Targets(ttft_s=2.0)
    rate, end = 1_000.0, 300.0
    arrivals = [(0.0, "r0", draw.randint(20, 400), False)]
    busy_until, number, outcomes = 0.0, 0, Counter[str]()
    served = 0
    while arrivals:
        arrivals.sort()
        now, name, num_tokens, came_back = arrivals.pop(0)
        if now > end:
            break
        if not came_back:
            number += 1
            arrivals.append((now + draw.expovariate(2 * rate / 210), f"r{number}", draw.randint(20, 400), False))
        wait_s = max(0.0, busy_until - now)
        # The pace is not known exactly.
        told = prediction(wait_s, prefill_s=0.1, tokens_per_s=rate * draw.uniform(0.9, 1.1), num_tokens=num_tokens)
        request_id = name if draw.random() < share_with_ids or came_back else ""
        try:
            check(slo, targets, told, now, request_id=request_id)
        except OverloadedError as error:
            outcomes["back, refused" if came_back else "new, refused"] += 1
            if request_id and draw.random() < 0.5 and error.retry_after_s < 60:
                arrivals.append((now + error.retry_after_s, name, num_tokens, True))
        else:
            outcomes["back, let in" if came_back else "new, let in"] += 1
            busy_until = max(busy_until, now) + num_tokens / rate
            served += num_tokens
            assert wait_s + 0.1 <= 2.0
    assert outcomes["back, let in"] > 50
    assert outcomes["back, let in"] / (outcomes["back, let in"] + outcomes["back, refused"]) >= 0.9
    assert served / (rate * end) >= 0.9


@dataclass(frozen=True, slots=True)
class Kind:
    """Tokens of a tenant's requests, all alike, and of all that it asks for in a second."""

    weight: float
    num_tokens: int
    tokens_per_s: float


KINDS = {"a": Kind(3.0, 100, 1_000.0), "b": Kind(2.0, 250, 667.0), "c": Kind(1.0, 900, 333.0)}
RATE = 1_000.0  # tokens a second that the cluster gives, in order


class Overload:
    """Requests that want their first token within 2 s; nothing waits in the coordinator, all on the nodes. Who is
    refused comes back when told to."""

    def __init__(self, kinds: dict[str, Kind]) -> None:
        self._slo = SloAdmission(weight_of=lambda tenant: kinds[tenant].weight)
        self._kinds = kinds
        self._draw = random.Random(7)
        self._busy_until = 0.0
        self.outcomes = Counter[str]()
        self.tokens = Counter[str]()

    def run(self, seconds: float) -> None:
        numbers = itertools.count()
        events = [(0.0, next(numbers), tenant, "") for tenant in self._kinds]
        while events and events[0][0] <= seconds:
            now, number, tenant, came_back = heapq.heappop(events)
            kind = self._kinds[tenant]
            if not came_back:
                interval = self._draw.expovariate(kind.tokens_per_s / kind.num_tokens)
                heapq.heappush(events, (now + interval, next(numbers), tenant, ""))
            delay_s = self._ask(tenant, kind, came_back or f"r{number}", now, bool(came_back))
            if delay_s > 0:
                heapq.heappush(events, (now + delay_s, next(numbers), tenant, came_back or f"r{number}"))

    def _ask(self, tenant: str, kind: Kind, name: str, now: float, came_back: bool) -> float:
        queue_s = max(0.0, self._busy_until - now)
        told = prediction(0.0, kind.num_tokens / RATE, queue_s, tokens_per_s=None, num_tokens=kind.num_tokens)
        try:
            check(self._slo, Targets(ttft_s=2.0), told, now, request_id=name, tenant=tenant)
        except OverloadedError as error:
            self.outcomes["back, refused" if came_back else "new, refused"] += 1
            return error.retry_after_s
        self.outcomes["back, let in" if came_back else "new, let in"] += 1
        self._busy_until = max(self._busy_until, now) + kind.num_tokens / RATE
        self.tokens[tenant] += kind.num_tokens
        return 0.0


def test_of_three_tenants_at_twice_the_capacity_each_gets_its_share_and_nine_of_ten_that_come_back_get_in() -> None:
    overload = Overload(KINDS)
    overload.run(300.0)
    assert overload.tokens.total() >= 0.9 * RATE * 300
    shares = {tenant: overload.tokens[tenant] / overload.tokens.total() for tenant in KINDS}
    assert shares == pytest.approx({"a": 3 / 6, "b": 2 / 6, "c": 1 / 6}, rel=0.1)
    outcomes = overload.outcomes
    assert outcomes["back, let in"] > 50
    assert outcomes["back, let in"] / (outcomes["back, let in"] + outcomes["back, refused"]) >= 0.9


def test_what_a_tenant_does_not_ask_for_goes_to_the_others() -> None:
    overload = Overload({**KINDS, "a": Kind(3.0, 100, 100.0)})
    overload.run(300.0)
    assert overload.tokens.total() >= 0.9 * RATE * 300
    assert overload.tokens["a"] >= 0.9 * 100 * 300, "less than its share, so all of it"
    assert overload.tokens["b"] == pytest.approx(2 / 3 * (overload.tokens.total() - overload.tokens["a"]), rel=0.1)
