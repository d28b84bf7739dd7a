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
    queue.admission.refused(first, now=0.0)
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
    queue.admission.refused(ticket, now=0.0)
    assert queue.new_turns() == ["first"]
    queue.admission.refused(ticket, now=0.0)
    assert queue.new_turns() == []


def test_resumed_request_goes_to_the_front_even_of_a_full_queue() -> None:
    queue = Queue(max_queue=1)
    waiting = queue.enter("waiting")
    queue.admission.refused(waiting, now=0.0)
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
    queue.admission.give_back("default", 1, 10, now=0.0)
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
    queue.admission.refused(first, now=0.0)
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
                queue.admission.refused(trying[-1], now=0.0)
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


# Several tenants


def served_in_order(queue: Queue, tickets: dict[str, Ticket], num_served: int) -> list[str]:
    """Those whose turn comes, one after another, each of whom gets its room at once."""
    order = queue.new_turns()
    while len(order) < num_served:
        queue.serve(tickets[order[-1]])
        order += queue.new_turns()
    return order


def test_tenants_take_turns_by_weight() -> None:
    queue = Queue(max_queue=40, max_trying=1, tenants="a:weight=1;b:weight=2")
    tickets = {f"a{number}": queue.enter(f"a{number}", "a", 100) for number in range(4)}
    tickets |= {f"b{number}": queue.enter(f"b{number}", "b", 100) for number in range(8)}
    assert served_in_order(queue, tickets, 9) == ["a0", "a1", "b0", "b1", "a2", "b2", "b3", "a3", "b4"]


def test_an_urgent_request_passes_its_own_tenants_and_no_one_elses() -> None:
    queue = Queue(max_trying=1)
    tickets = {"first": queue.enter("first", "a", 100)}
    tickets |= {name: queue.enter(name, name[0], 100) for name in ("a1", "b1", "a2", "b2")}
    tickets["a!"] = queue.enter("a!", "a", 100, priority=100, now=1.0)
    assert served_in_order(queue, tickets, 6) == ["first", "a!", "b1", "a1", "b2", "a2"]


def test_a_refused_request_is_passed_by_no_tenant() -> None:
    queue = Queue(max_trying=2)
    large = queue.enter("large", "a", 900)
    assert queue.new_turns() == ["large"]
    queue.admission.refused(large, now=0.0)
    small = queue.enter("small", "b", 1)
    assert queue.new_turns() == []
    queue.admission.changed()
    assert queue.new_turns() == ["large"]
    queue.serve(large)
    assert queue.new_turns() == ["small"]
    queue.serve(small)
    assert queue.admission.num_waiting == 0


def test_one_that_lost_its_node_goes_first_and_is_not_charged_again() -> None:
    queue = Queue(max_trying=1)
    tickets = {name: queue.enter(name, name[0], 100) for name in ("a0", "a1", "b0", "b1")}
    tickets["a-lost"] = queue.come_back("a-lost", "a")
    assert served_in_order(queue, tickets, 5) == ["a0", "a-lost", "b0", "a1", "b1"]


def test_more_answers_to_one_prompt_go_first_and_are_charged() -> None:
    queue = Queue(max_trying=1)
    tickets = {name: queue.enter(name, name[0], 100) for name in ("a0", "a1", "b0", "b1", "b2", "b3")}
    tickets["a0-2"] = queue.come_back("a0-2", "a", num_tokens=200)
    assert served_in_order(queue, tickets, 7) == ["a0", "a0-2", "b0", "b1", "a1", "b2", "b3"]


def test_one_that_gives_up_unserved_costs_its_tenant_nothing() -> None:
    queue = Queue(max_trying=1)
    large = queue.enter("a-large", "a", 1000)
    tickets = {name: queue.enter(name, name[0], 100) for name in ("a1", "b0", "b1", "b2")}
    assert queue.new_turns() == ["a-large"]
    queue.admission.refused(large, now=0.0)
    queue.admission.leave(large, 1.0)
    assert served_in_order(queue, tickets, 4) == ["a1", "b0", "b1", "b2"]


def test_who_comes_back_when_it_was_told_to_finds_its_place() -> None:
    """While others, who came for the first time at the same moment, are told to wait behind it."""
    queue = Queue(max_queue=4, max_trying=1)
    tickets = [queue.enter(f"r{number}") for number in range(4)]
    with pytest.raises(OverloadedError) as refused:
        queue.admission.check_room("default", 0.0, request_id="mine")
    delay_s = refused.value.retry_after_s
    assert delay_s == 1.0
    queue.serve(tickets[0])
    with pytest.raises(OverloadedError, match="over the 4 that this coordinator queues, where 1 are kept for others"):
        queue.admission.check_room("default", delay_s, request_id="new")
    queue.admission.check_room("default", delay_s, request_id="mine")
    queue.admission.got_in("default", "mine")
    queue.admission.check_room("default", delay_s, request_id="new")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "come back", "admit", "refuse", "leave", "keep", "change"]), st.integers(0, 99)
    ),
    max_size=80,
)


@given(STEPS)
def test_counts_are_exact_in_any_state_and_everyone_is_served_in_the_end(steps: list[tuple[str, int]]) -> None:
    queue = Queue(max_queue=6, max_trying=2, tenants="a:weight=2;b:weight=1")
    waiting: dict[Ticket, str] = {}
    kept = {"a": 0, "b": 0, "c": 0}
    for number, (step, draw) in enumerate(steps):
        tenant, some = "abc"[draw % 3], sorted(waiting, key=lambda ticket: (ticket.entered_at, id(ticket)))
        trying = [ticket for ticket in some if ticket.trying]
        match step:
            case "enter" if not queue.places.why_no_room(tenant, 1, draw):
                waiting[queue.enter("new", tenant, draw, priority=draw - 50, now=float(number))] = tenant
            case "come back":
                waiting[queue.come_back("back", tenant, num_tokens=draw % 2, refused=draw % 5 == 0)] = tenant
            case "admit" if trying:
                queue.serve(trying[draw % len(trying)])
                del waiting[trying[draw % len(trying)]]
            case "refuse" if trying:
                queue.admission.refused(trying[draw % len(trying)], now=0.0)
            case "leave" if some:
                queue.admission.leave(some[draw % len(some)], float(number))
                queue.admission.leave(some[draw % len(some)], float(number))
                del waiting[some[draw % len(some)]]
            case "keep" if kept[tenant]:
                queue.admission.give_back(tenant, 1, 10, now=0.0)
                kept[tenant] -= 1
            case "keep" if not queue.places.why_no_room(tenant, 1, 10):
                queue.admission.keep(tenant, float(number), 1, 10)
                kept[tenant] += 1
            case "change":
                queue.admission.changed()
        assert queue.admission.num_waiting == len(waiting)
        assert sum(ticket.trying for ticket in waiting) <= 2
        for name, num_kept in kept.items():
            own = [ticket for ticket, owner in waiting.items() if owner == name]
            tokens = sum(ticket.demand.num_tokens for ticket in own) + 10 * num_kept
            taken = queue.places.taken(name)
            assert (taken.num_places, taken.num_tokens) == (len(own) + num_kept, tokens)
    for _ in range(len(waiting)):
        queue.admission.changed()
        served = next(ticket for ticket in waiting if ticket.trying)
        queue.serve(served)
        del waiting[served]
    assert queue.admission.num_waiting == 0
