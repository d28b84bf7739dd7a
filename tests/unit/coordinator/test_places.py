"""Bounds on what waits: answers and tokens, of one tenant and of all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.places import Places
from coordinator.tenant_policy import parse_policies


def places(tenants: str = "", max_places: int = 12, max_tokens: int = 0) -> Places:
    return Places(parse_policies(tenants), max_places, max_tokens)


def test_one_tenant_alone_may_have_every_place() -> None:
    queue = places()
    queue.take("any", 11, 110)
    assert queue.why_no_room("any", 1, 10) == ""
    assert queue.why_no_room("any", 2, 10) == (
        "11 answers wait already, and 2 more would be over the 12 that this coordinator queues; try again later"
    )
    assert queue.most("any") == 12


def test_a_flood_leaves_every_named_tenant_its_part() -> None:
    queue = places("a:weight=2;b:weight=3;*:weight=1")  # 4 and 6 places are theirs, and 2 nobody's
    assert [queue.most(tenant) for tenant in ("a", "b", "other")] == [6, 8, 2]
    queue.take("a", 6, 60)
    assert queue.why_no_room("a", 1, 10) == (
        "6 answers wait already, and 1 more would be over the 12 that this coordinator queues, where 6 are kept for "
        "others; try again later"
    )
    assert queue.why_no_room("b", 6, 60) == ""
    assert queue.why_no_room("b", 7, 70) != ""
    assert queue.why_no_room("other", 1, 10) != "", "the two places that nobody is owed are taken"
    queue.give_back("a", 2, 20)
    assert queue.why_no_room("other", 2, 20) == ""


def test_a_tenants_own_bounds() -> None:
    queue = places("a:max_queued=3,max_queued_tokens=100", max_places=100)
    queue.take("a", 2, 90)
    assert queue.why_no_room("a", 2, 2) == (
        "2 answers wait already, and 2 more would be over the 3 that tenant 'a' may queue; try again later"
    )
    assert queue.why_no_room("a", 1, 10) == ""
    assert queue.why_no_room("a", 1, 11) == (
        "answers of 90 tokens of tenant 'a' wait already, and 11 more would be over the 100 that may; try again later"
    )
    assert queue.why_no_room("b", 50, 10_000) == ""
    assert queue.most("a") == 3


def test_tokens_of_all_together() -> None:
    queue = places(max_tokens=100)
    queue.take("a", 1, 60)
    queue.take("b", 1, 30)
    assert queue.why_no_room("a", 1, 10) == ""
    assert queue.why_no_room("a", 1, 11).startswith("answers of 90 tokens wait already")


def test_what_alone_wants_more_tokens_than_may_wait_enters_an_empty_queue() -> None:
    queue = places("a:max_queued_tokens=100", max_tokens=150)
    assert queue.why_no_room("a", 1, 5_000) == ""
    queue.take("a", 1, 5_000)
    assert queue.why_no_room("a", 1, 1) != ""
    assert queue.why_no_room("b", 1, 1) == "", "nobody is locked out by another one's large request"


@pytest.mark.parametrize("num_kept", [1, 3])
def test_places_that_are_kept_count_as_taken(num_kept: int) -> None:
    queue = places(max_places=4)
    assert queue.why_no_room("a", 4 - num_kept, 1, num_kept) == ""
    assert queue.why_no_room("a", 5 - num_kept, 1, num_kept) != ""


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 50), st.booleans()), max_size=60)


@given(STEPS)
def test_counts_are_exact_and_parts_are_left(steps: list[tuple[str, int, int, bool]]) -> None:
    counted: Counter[str] = Counter()
    policies = parse_policies("a:weight=2;b:weight=1;*:weight=1")
    queue = Places(policies, 12, on_count=lambda tenant, num_places, _: counted.update({tenant: num_places}))
    taken: Counter[str] = Counter()
    for tenant, num_places, num_tokens, enters in steps:
        if enters and not queue.why_no_room(tenant, num_places, num_tokens):
            queue.take(tenant, num_places, num_tokens)
            taken[tenant] += num_places
        elif not enters and taken[tenant] >= num_places:
            queue.give_back(tenant, num_places, 0)
            taken[tenant] -= num_places
        assert queue.num_taken == taken.total() <= 12
        assert +counted == +taken
        assert queue.taken(tenant).num_places == taken[tenant]
        for name, part in (("a", 6), ("b", 3)):
            if taken[name] < part:
                assert queue.why_no_room(name, part - taken[name], 1) == ""
