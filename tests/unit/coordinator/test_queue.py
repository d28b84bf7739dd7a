"""A tenant's requests, by priority and age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.queue import AGEING_S, Demand, TenantQueue, Ticket
from kvrelay.inference import MAX_PRIORITY, MIN_PRIORITY


def ticket(entered_at: float, priority: int = 0) -> Ticket:
    return Ticket(lambda: None, Demand(priority=priority), entered_at)


def taken(*tickets: Ticket) -> list[int]:
    """In which order they go, by their places among the arguments."""
    queue = TenantQueue()
    for one in tickets:
        queue.add(one)
    return [tickets.index(queue.take()) for _ in range(len(queue))]


def test_equals_go_in_order_of_arrival() -> None:
    assert taken(ticket(0.0), ticket(0.0), ticket(1.0)) == [0, 1, 2]


def test_more_priority_goes_first() -> None:
    assert taken(ticket(0.0, -5), ticket(0.0), ticket(0.5, 5)) == [2, 1, 0]


def test_waiting_adds_a_point_every_quarter_second() -> None:
    assert taken(ticket(0.0, 0), ticket(2.4, 10)) == [1, 0]
    assert taken(ticket(0.0, 0), ticket(2.6, 10)) == [0, 1]


def test_one_that_left_is_passed_over() -> None:
    queue, first, second = TenantQueue(), ticket(0.0), ticket(1.0)
    queue.add(first)
    queue.add(second)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert queue.take() is second
    assert len(queue) == 0
    with pytest.raises(LookupError):
        queue.take()


@given(st.integers(MIN_PRIORITY, MAX_PRIORITY), st.integers(1, 50))
def test_a_steady_stream_of_urgent_requests_starves_nobody(priority: int, num_a_second: int) -> None:
    """One is passed by those alone that come in the (MAX_PRIORITY - priority) x AGEING_S seconds after it."""
    queue, patient, now = TenantQueue(), ticket(0.0, priority), 0.0
    queue.add(patient)
    bound_s = (MAX_PRIORITY - priority) * AGEING_S
    while True:
        now += 1 / num_a_second
        queue.add(ticket(now, MAX_PRIORITY))
        if queue.take() is patient:
            break
        assert now <= bound_s
    assert now <= bound_s + 2 / num_a_second


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 8)), max_size=20), st.integers(-5, 5))
def test_what_goes_before_one_that_comes_now_is_what_is_taken_before_it(
    others: list[tuple[int, int]], priority: int
) -> None:
    queue = TenantQueue()
    for number, (own_priority, entered_at) in enumerate(others):
        queue.add(Ticket(lambda: None, Demand(num_tokens=2**number, priority=own_priority), entered_at))
    expected, last = queue.num_tokens_before(priority, 8.0), ticket(8.0, priority)
    assert queue.num_tokens == 2 ** len(others) - 1
    queue.add(last)
    taken_before = 0
    while (one := queue.take()) is not last:
        taken_before += one.demand.num_tokens
    assert taken_before == expected
