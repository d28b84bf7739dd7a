"""Who may ask for room, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.retry_advice import RetryAdvice
from coordinator.tenant_policy import TenantPolicies, parse_policies
from kvrelay.errors import OverloadedError


class Queue:
    """An Admission whose turns are noted by name. A round's credit at weight 1 is 100 tokens."""

    def __init__(self, max_queue: int = 10, max_trying: int = 2, tenants: str = "", max_tokens: int = 0) -> None:
        policies = parse_policies(tenants) if tenants else TenantPolicies()
        self.places = Places(policies, max_queue, max_tokens)
        self.rounds = DeficitRounds(policies.weight, quantum_tokens=100)
        self.admission = Admission(self.places, self.rounds, RetryAdvice(), max_trying=max_trying)
        self.turns: list[str] = []

    def enter(
        self, name: str, tenant: str = "default", num_tokens: int = 10, *, priority: int = 0, now: float = 0.0
    ) -> Ticket:
        self.admission.check_room(tenant, now, num_tokens=num_tokens)
        return self.admission.enter(self._noting(name), Demand(tenant, num_tokens, priority), now)

    def come_back(self, name: str, tenant: str = "default", num_tokens: int = 0, *, refused: bool = False) -> Ticket:
        demand = Demand(tenant, num_tokens)
        return self.admission.enter_in_front(self._noting(name), demand, 0.0, refused=refused)

    def serve(self, ticket: Ticket) -> None:
        self.admission.admitted(ticket, now=0.0)

    def new_turns(self) -> list[str]:
        turns, self.turns = self.turns, []
        return turns

    def _noting(self, name: str) -> Callable[[], None]:
        return lambda: self.turns.append(name)


def test_several_try_at_once_in_order() -> None:
    queue = Queue(max_trying=2)
    first = queue.enter("first")
    queue.enter("second")
    queue.enter("third")
    assert queue.new_turns() == ["first", "second"]
    queue.admission.admitted(first, now=1.0)
    assert queue.new_turns() == ["third"]
    assert queue.admission.num_waiting == 2


def test_nobody_passes_a_request_that_was_refused() -> None:
    queue = Queue(max_trying=1)
    first = queue.enter("first")
    queue.enter("second")
    queue.admission.refused(first)
    assert queue.new_turns() == ["first"]  # and not the second
    queue.admission.changed()
    assert queue.new_turns() == ["first"]
    queue.admission.admitted(first, now=1.0)
    assert queue.new_turns() == ["second"]


def test_change_during_a_try_means_another_try() -> None:
    queue = Queue()
    ticket = queue.enter("first")
    queue.admission.changed()
    assert queue.new_turns() == ["first"]
    queue.admission.refused(ticket)
    assert queue.new_turns() == ["first"]
    queue.admission.refused(ticket)
    assert queue.new_turns() == []


def test_resumed_request_goes_to_the_front_even_of_a_full_queue() -> None:
    queue = Queue(max_queue=1)
    waiting = queue.enter("waiting")
    queue.admission.refused(waiting)
    queue.new_turns()
    with pytest.raises(OverloadedError, match="1 answers wait already"):
        queue.enter("too many")
    queue.come_back("resumed")
    assert queue.new_turns() == ["resumed"]


def test_kept_places_count_until_they_are_given_back() -> None:
    queue = Queue(max_queue=3)
    queue.admission.check_room("default", 0.0, num_places=3)
    queue.enter("first")
    queue.admission.keep("default", 0.0, 2, 20)
    assert queue.admission.num_waiting == 1
    with pytest.raises(OverloadedError, match="3 answers wait already, and 1 more would be over the 3"):
        queue.enter("other")
    queue.admission.give_back("default", 1, 10)
    queue.admission.check_room("default", 0.0, num_places=1)
    with pytest.raises(OverloadedError, match="2 answers wait already, and 2 more would be over the 3"):
        queue.admission.check_room("default", 0.0, num_places=2)


def test_request_that_was_just_refused_waits_for_a_change() -> None:
    queue = Queue()
    queue.come_back("back", refused=True)
    assert queue.new_turns() == []
    queue.admission.changed()
    assert queue.new_turns() == ["back"]


def test_one_who_leaves_makes_way() -> None:
    queue = Queue(max_trying=1)
    first = queue.enter("first")
    queue.admission.refused(first)
    queue.enter("second")
    queue.new_turns()
    queue.admission.leave(first, 0.0)
    assert queue.new_turns() == ["second"]
    queue.admission.leave(first, 0.0)  # twice is harmless
    assert queue.admission.num_waiting == 1


def test_advice_follows_the_waits_within_bounds() -> None:
    queue = Queue()
    assert queue.admission.retry_after_s("default") == 1.0
    for _ in range(200):
        queue.admission.admitted(queue.enter("patient"), now=8.0)
    assert queue.admission.retry_after_s("default") == pytest.approx(8.0)
    for _ in range(200):
        queue.admission.admitted(queue.enter("patient"), now=500.0)
    assert queue.admission.retry_after_s("default") == 30.0


@given(st.lists(st.sampled_from(["enter", "resume", "admit", "refuse", "leave", "change"]), max_size=60))
def test_no_wake_up_is_lost(steps: list[str]) -> None:
    """Whatever happens, some request may try, or none waits, or all that may were refused since the last change."""
    queue = Queue(max_queue=5, max_trying=2)
    tickets: list[Ticket] = []
    for step in steps:
        trying = [ticket for ticket in tickets if ticket.trying]
        match step:
            case "enter" if len(tickets) < 5:
                tickets.append(queue.enter("new"))
            case "resume":
                tickets.insert(0, queue.come_back("resumed"))
            case "admit" if trying:
                queue.admission.admitted(trying[0], now=1.0)
                tickets.remove(trying[0])
            case "refuse" if trying:
                queue.admission.refused(trying[-1])
            case "leave" if tickets:
                queue.admission.leave(tickets.pop(), 0.0)
            case "change":
                queue.admission.changed()
        assert queue.admission.num_waiting == len(tickets)
        assert sum(ticket.trying for ticket in tickets) <= 2
        if tickets and not any(ticket.trying for ticket in tickets):
            assert tickets[0].refused_at is not None
    queue.admission.changed()
    assert not tickets or any(ticket.trying for ticket in tickets)
