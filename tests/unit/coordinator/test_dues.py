"""Who is due what of what is let in."""

from __future__ import annotations

import pytest

from coordinator.dues import Dues

WEIGHTS = {"a": 3.0, "b": 2.0, "c": 1.0}


def dues() -> Dues:
    return Dues(WEIGHTS.__getitem__)


def test_by_weight_among_those_that_want_more() -> None:
    some = dues()
    assert some.part("a", 0.0) == 1.0
    some.refused("b", 0.0)
    assert some.part("a", 0.0) == pytest.approx(3 / 5)
    assert some.part("b", 5.0) == 1.0
    some.refused("c", 4.0)
    assert some.part("b", 5.0) == pytest.approx(2 / 3)
    assert some.part("a", 5.5) == pytest.approx(3 / 4), "b was refused too long ago"


def test_what_others_take_that_want_no_more_is_not_divided() -> None:
    some = dues()
    for tenant, num_tokens in (("a", 100), ("b", 100), ("c", 200)):
        some.let_in(tenant, num_tokens, num_tokens, 0.0)
    some.refused("b", 0.0)
    some.refused("c", 0.0)
    assert some.part("b", 0.0) == pytest.approx(3 / 4 * 2 / 3)
    assert some.part("c", 0.0) == pytest.approx(3 / 4 * 1 / 3)


def test_who_had_next_to_nothing_is_due_its_weight_all_the_same() -> None:
    """The others were never refused, so all of it was theirs, and yet it is not to wait for what they leave."""
    some = dues()
    for tenant, num_tokens in (("a", 989), ("b", 1), ("c", 10)):
        some.let_in(tenant, num_tokens, num_tokens, 0.0)
    some.refused("b", 0.0)
    assert some.part("b", 0.0) == pytest.approx(2 / 6)
    some.let_in("c", 10, 10, 31.0)
    some.refused("b", 31.0)
    assert some.part("b", 31.0) == pytest.approx(2 / 3), "a had nothing for half a minute"


def test_of_many_tenants_that_were_refused_the_last_are_remembered() -> None:
    some = Dues(lambda tenant: 1.0)
    for number in range(1_001):
        some.refused(f"t{number}", 0.0)
    some.let_in("other", 100, 100, 0.0)
    assert not some.is_behind("t0", "other", 0.0)
    assert some.is_behind("t1", "other", 0.0)


def test_ahead_is_who_had_more_over_its_weight_than_one_that_wants_more() -> None:
    some = dues()
    some.let_in("a", 300, 300, 0.0)
    some.let_in("b", 200, 200, 0.0)
    some.let_in("c", 90, 90, 0.0)
    assert not some.is_ahead("a", 0.0), "nobody wants more"
    some.refused("b", 0.0)
    assert not some.is_ahead("a", 0.0), "as much"
    some.refused("c", 0.0)
    assert some.is_ahead("a", 0.0)
    assert some.is_ahead("b", 0.0)
    assert not some.is_ahead("c", 0.0)
    assert some.is_behind("c", "a", 0.0)
    assert not some.is_behind("b", "a", 0.0), "as much"
    assert not some.is_ahead("a", 6.0)
    assert not some.is_behind("c", "a", 6.0), "it wants no more"


def test_what_was_let_in_long_ago_counts_for_little() -> None:
    some = dues()
    some.let_in("b", 2_000, 2_000, 0.0)
    some.let_in("a", 1_000, 1_000, 0.0)
    some.let_in("a", 400, 400, 90.0)
    some.refused("b", 90.0)
    assert some.is_ahead("a", 90.0), "450 and 100"
    assert some.part("a", 90.0) == pytest.approx(3 / 5)


def test_the_pace_is_told_of_times_in_which_somebody_wants_more() -> None:
    some = dues()
    some.let_in("a", 1_000, 5_000, 0.0)
    assert some.positions_per_s(10.0) is None
    some.refused("a", 10.0)
    some.let_in("a", 1, 100, 12.0)
    some.let_in("b", 1, 300, 14.0)
    assert some.positions_per_s(14.0) == 100.0
    assert some.positions_per_s(15.0) == 80.0
    assert some.positions_per_s(1_000.0) == 80.0, "5 s after the last refusal nobody does"
