"""How fast room comes free, and how long what waits will wait."""

from __future__ import annotations

import pytest

from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.queue_wait import AdmittedPace
from coordinator.retry_advice import RetryAdvice
from coordinator.tenant_policy import TenantPolicies, parse_policies


def test_the_pace_is_of_the_time_in_which_room_lacked() -> None:
    pace = AdmittedPace()
    pace.admitted(10_000, 1.0)  # nothing was refused room: it says nothing
    pace.begin(10.0)
    pace.admitted(50, 11.0)
    assert pace.tokens_per_s(11.0) is None, "too few"
    for second in (12, 13, 14):
        pace.admitted(50, second)
    assert pace.tokens_per_s(14.0) == 50.0
    pace.end(14.0)
    assert pace.tokens_per_s(1_000.0) == 50.0, "a quiet hour is not slow"
    pace.begin(1_000.0)
    assert pace.lacks_room
    pace.admitted(50, 1_001.0)
    assert pace.tokens_per_s(1_001.0) == 50.0
    assert pace.tokens_per_s(1_006.0) == 25.0, "and then nothing for five seconds"


def test_old_moments_are_forgotten() -> None:
    pace = AdmittedPace()
    pace.begin(0.0)
    for second in range(1, 100):
        pace.admitted(10, second)
    for second in range(100, 200):
        pace.admitted(70, second)
    assert pace.tokens_per_s(199.0) == 70.0


class Queue:
    """An Admission at which room comes free at 100 tokens a second, and a first ticket lacks it at time 4."""

    def __init__(self, tenants: str = "") -> None:
        policies = parse_policies(tenants) if tenants else TenantPolicies()
        rounds = DeficitRounds(policies.weight, quantum_tokens=10)
        self.admission = Admission(Places(policies, 1_000), rounds, RetryAdvice(), max_trying=1)
        for second in range(4):
            ticket = self.enter(num_tokens=100, now=second)
            self.admission.refused(ticket, now=second)
            self.admission.admitted(ticket, now=second + 1)
        self.head = self.enter(num_tokens=50, now=4.0)
        self.admission.refused(self.head, now=4.0)

    def enter(self, tenant: str = "a", num_tokens: int = 10, *, priority: int = 0, now: float = 4.0) -> Ticket:
        return self.admission.enter(lambda: None, Demand(tenant, num_tokens, priority), now)

    def wait_s(self, tenant: str = "a", num_tokens: int = 10, *, priority: int = 0, free: int = 0) -> float:
        return self.admission.wait_s(Demand(tenant, num_tokens, priority), free, 4.0)


def test_it_waits_until_all_before_it_and_it_itself_have_room() -> None:
    queue = Queue()
    assert queue.wait_s(num_tokens=50) == pytest.approx(1.0)
    queue.enter(num_tokens=100)
    assert queue.wait_s(num_tokens=50) == pytest.approx(2.0)
    assert queue.wait_s(num_tokens=50, free=10_000) == pytest.approx(2.0), "room that the head cannot use is none"


def test_where_nothing_lacks_room_what_is_free_comes_first() -> None:
    queue = Queue()
    queue.admission.leave(queue.head, now=4.0)
    assert queue.wait_s(num_tokens=50, free=50) == 0.0
    assert queue.wait_s(num_tokens=50) == pytest.approx(0.5)
    assert queue.wait_s(num_tokens=150, free=50) == pytest.approx(1.0)


def test_before_anything_is_known_no_wait_is_predicted() -> None:
    policies = TenantPolicies()
    admission = Admission(Places(policies, 10), DeficitRounds(policies.weight), RetryAdvice())
    assert admission.wait_s(Demand("a", 10_000), 0, 0.0) == 0.0
    assert admission.tokens_per_s(0.0) is None


def test_what_has_less_priority_is_passed_and_what_has_waited_is_not() -> None:
    queue = Queue()
    queue.enter(num_tokens=100, priority=-10, now=4.0)
    queue.enter(num_tokens=100, priority=-10, now=1.0)  # 3 s are worth 12 points
    assert queue.wait_s(num_tokens=50) == pytest.approx(2.0)
    assert queue.wait_s(num_tokens=50, priority=-10) == pytest.approx(3.0)
    assert queue.wait_s(num_tokens=50, priority=100) == pytest.approx(1.0)


def test_other_tenants_take_their_share_meanwhile_and_no_more_than_they_want() -> None:
    queue = Queue("a:weight=2;b:weight=1;c:weight=1")
    for _ in range(20):
        queue.enter("a", 100)
        queue.enter("b", 100)
    own = 50 + 20 * 100 + 100
    assert queue.wait_s("a", 100) == pytest.approx((own + 1_000) / 100, abs=0.5)
    assert queue.wait_s("b", 100) == pytest.approx((50 + 2_000 + 100 + 2_000) / 100, abs=0.5), "all of a's 2,000"
    assert queue.wait_s("c", 100) == pytest.approx((50 + 100) / 100, abs=0.5), "its turn is next"
    assert queue.admission.tokens_per_s(4.0) == pytest.approx(100)


def test_the_prediction_comes_true() -> None:
    """A pool that gives back 100 tokens each second, to whoever's turn it is."""
    queue = Queue("a:weight=2;b:weight=1")
    turns: list[tuple[str, Ticket]] = []

    def enter(name: str, tenant: str, num_tokens: int) -> None:
        ticket: Ticket = queue.admission.enter(lambda: turns.append((name, ticket)), Demand(tenant, num_tokens), 4.0)

    for number in range(30):
        enter(f"a{number}", "a", 100)
        enter(f"b{number}", "b", 50)
    predicted = queue.wait_s("b", 50)
    enter("last", "b", 50)
    now = 4.5
    queue.admission.admitted(queue.head, now)
    while turns[-1][0] != "last":
        _, ticket = turns[-1]
        now += ticket.demand.num_tokens / 100
        queue.admission.admitted(ticket, now)
    now += 0.5
    assert predicted == pytest.approx(now - 4.0, rel=0.05)
