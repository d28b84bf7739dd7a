"""Which coordinator is asked next, and when."""

from __future__ import annotations

import pytest

from kvrelay.rounds import Rounds


def steps(rounds: Rounds, *failures: float) -> list[tuple[int, float] | None]:
    """What follows failures with these advices, each told when its attempt's pause is over."""
    now, taken = 100.0, list[tuple[int, float] | None]()
    for retry_after_s in failures:
        pause_s = rounds.next(retry_after_s, now)
        taken.append(None if pause_s is None else (rounds.current, round(pause_s, 6)))
        now += pause_s or 0.0
    return taken


def test_each_is_asked_once_and_then_again_after_pauses_that_double() -> None:
    rounds = Rounds(2, 0, num_rounds=3, draw=lambda: 0.0)
    assert steps(rounds, *[0.0] * 6) == [(1, 0.0), (0, 0.1), (1, 0.0), (0, 0.2), (1, 0.0), None]


def test_one_alone_is_asked_as_often_as_there_are_rounds() -> None:
    assert steps(Rounds(1, 0, num_rounds=1, draw=lambda: 0.0), 0.0) == [None]
    assert steps(Rounds(1, 0, num_rounds=3, draw=lambda: 0.0), *[0.0] * 3) == [(0, 0.1), (0, 0.2), None]


def test_pauses_are_bounded() -> None:
    pauses = steps(Rounds(1, 0, num_rounds=8, draw=lambda: 0.0), *[0.0] * 7)
    assert pauses == [(0, 0.1), (0, 0.2), (0, 0.4), (0, 0.8), (0, 1.6), (0, 2.0), (0, 2.0)]


def test_who_said_when_to_come_back_is_asked_then_and_not_before() -> None:
    rounds = Rounds(3, 1, num_rounds=2, draw=lambda: 0.0)
    assert steps(rounds, 5.0, 0.0, 1.0) == [(2, 0.0), (0, 0.0), (2, 0.1)]
    assert rounds.next(0.0, 100.1) == pytest.approx(0.9)
    assert rounds.current == 0
    assert rounds.next(0.0, 101.0) == pytest.approx(4.0)
    assert rounds.current == 1
    assert rounds.next(0.0, 105.0) is None


def test_the_first_and_what_comes_after_it() -> None:
    rounds = Rounds(3, 2, num_rounds=1, draw=lambda: 0.0)
    assert rounds.current == 2
    assert steps(rounds, 0.0, 0.0, 0.0) == [(0, 0.0), (1, 0.0), None]


def test_jitter_adds_up_to_half_of_a_pause() -> None:
    assert steps(Rounds(1, 0, num_rounds=2, draw=lambda: 0.999999), 0.0) == [(0, pytest.approx(0.15, abs=1e-5))]
    assert steps(Rounds(1, 0, num_rounds=2, draw=lambda: 0.5), 4.0) == [(0, 5.0)]


def test_one_that_may_have_it_still_is_asked_once_more_if_it_may_be_asked_at_all() -> None:
    rounds = Rounds(2, 0, num_rounds=2, draw=lambda: 0.0)
    assert rounds.next(0.0, 100.0, stay=True) == pytest.approx(0.1)
    assert rounds.current == 0
    assert rounds.next(0.0, 100.1, stay=True) == 0.0
    assert rounds.current == 1


def test_after_something_new_failures_count_anew() -> None:
    rounds = Rounds(1, 0, num_rounds=2, draw=lambda: 0.0)
    assert steps(rounds, 0.0) == [(0, 0.1)]
    rounds.advanced()
    assert steps(rounds, 0.0, 0.0) == [(0, 0.1), None]
