"""How fast work goes: weighted over work, and a line that stays one whatever is put in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.rates import Line, WorkRate

NO_NUMBERS = [0.0, -1.0, math.nan, math.inf, -math.inf]


def test_a_rate_is_unknown_before_any_work_and_then_that_of_the_work() -> None:
    rate = WorkRate(half_amount=1_000)
    assert rate.per_s == 0.0
    rate.add(500, 0.25)
    assert rate.per_s == 2_000


def test_work_done_counts_half_once_as_much_as_the_half_amount_was_done_after_it() -> None:
    rate = WorkRate(half_amount=1_000)
    rate.add(1_000, 1.0)
    rate.add(1_000, 0.5)
    assert rate.per_s == pytest.approx(1_500 / 1.0)


def test_a_small_slow_piece_counts_as_little_as_it_is() -> None:
    """Steps of 512 tokens in 0.5 s and of one in 0.02 s: 513 in 0.52 s, not the mean of 1,024 and 50 a second."""
    rate = WorkRate(half_amount=4_096)
    for _ in range(40):
        rate.add(1, 0.02)
        rate.add(512, 0.5)
    assert rate.per_s == pytest.approx(513 / 0.52, rel=0.01)


def test_one_pause_moves_a_rate_little() -> None:
    """512 tokens at 1,024 a second that take 60 s for once count as four times their 0.5 s."""
    rate = WorkRate(half_amount=2_048)
    for _ in range(40):
        rate.add(512, 0.5)
    rate.add(512, 60.0)
    assert 650 < rate.per_s < 750


@pytest.mark.parametrize("odd", NO_NUMBERS)
def test_what_is_no_amount_or_no_time_says_nothing(odd: float) -> None:
    rate = WorkRate(half_amount=1_000)
    rate.add(500, 0.25)
    rate.add(odd, 1.0)
    rate.add(1, odd)
    assert rate.per_s == 2_000


def test_a_line_finds_base_and_slope_of_a_batch_that_varies() -> None:
    line = Line()
    for rows in (1, 2, 4, 8, 16, 3, 5, 9, 12, 2, 7, 1):
        line.add(rows, 0.010 + 0.002 * rows)
    assert line.base == pytest.approx(0.010, rel=0.02)
    assert line.slope == pytest.approx(0.002, rel=0.02)


def test_a_batch_that_never_varies_gives_its_step_and_no_slope() -> None:
    line = Line()
    for _ in range(200):
        line.add(8, 0.05)
    assert (line.base, line.slope) == (pytest.approx(0.05), 0.0)


def test_a_slope_that_is_known_stays_while_the_batch_does() -> None:
    line = Line()
    for rows in (1, 16) * 20:
        line.add(rows, 0.010 + 0.002 * rows)
    for _ in range(1_000):
        line.add(4, 0.018)
    assert line.slope == pytest.approx(0.002, rel=0.05)
    assert line.at(4) == pytest.approx(0.018, rel=0.01)


def test_it_follows_a_change() -> None:
    line = Line()
    for rows in (1, 16) * 50:
        line.add(rows, 0.010 + 0.002 * rows)
    for rows in (1, 16) * 150:
        line.add(rows, 0.100 + 0.010 * rows)
    assert line.at(8) == pytest.approx(0.18, rel=0.02)


def test_one_pause_moves_it_little() -> None:
    line = Line()
    for _ in range(50):
        line.add(2, 0.02)
    line.add(2, 5.0)
    assert line.at(2) == pytest.approx(0.0219, rel=0.01)  # not 0.17


def test_steps_that_get_shorter_with_more_rows_have_no_slope() -> None:
    line = Line()
    for rows in (1, 2, 4, 8) * 10:
        line.add(rows, 0.1 / rows)
    assert line.slope == 0.0
    assert line.base > 0


@given(st.lists(st.tuples(st.floats(), st.floats())), st.floats(0, 1e9))
def test_it_is_never_below_0_and_always_a_number(samples: list[tuple[float, float]], x: float) -> None:
    line = Line()
    for rows, seconds in samples:
        line.add(min(rows, 1e6), min(seconds, 1e6))
    assert line.base >= 0
    assert line.slope >= 0
    assert math.isfinite(line.at(x))
