"""How much a step takes on: less while newcomers wait for too long, more again when they do not."""

from __future__ import annotations

import pytest

from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.errors import InvalidRequestError
from kvrelay.limits import QueueMarks

MARKS = QueueMarks(low_s=0.03, high_s=0.1)
MOST = 512


def settled(least: int, wait_of: float, num_newcomers: int = 200) -> int:
    """The bound once that many came, where a token makes each of them wait for so long in the mean."""
    bound = AdaptiveBound(MARKS, least)
    for _ in range(num_newcomers):
        bound.stepped(is_full=True)
        bound.waited(bound.of(MOST) * wait_of)
    return bound.of(MOST)


def test_begins_with_all_there_is() -> None:
    assert AdaptiveBound(MARKS).of(MOST) == MOST


def test_long_waits_shorten_steps_until_they_are_at_most_the_high_mark() -> None:
    assert settled(1, wait_of=0.001) == pytest.approx(91, abs=10)


def test_short_waits_leave_steps_as_long_as_they_may_be() -> None:
    assert settled(1, wait_of=0.029 / MOST) == MOST


def test_never_falls_below_the_least() -> None:
    assert settled(32, wait_of=1.0) == 32


def test_a_least_above_the_most_gives_way_to_it() -> None:
    assert AdaptiveBound(MARKS, least=32).of(8) == 8


def test_between_the_marks_nothing_changes() -> None:
    bound = AdaptiveBound(MARKS)
    for _ in range(4):
        bound.waited(0.5)
    before = bound.of(MOST)
    assert before < MOST
    for _ in range(40):  # the mean comes down to 0.05, above the low mark
        bound.stepped(is_full=True)
        bound.waited(0.05)
    after = bound.of(MOST)
    for _ in range(100):
        bound.stepped(is_full=True)
        bound.waited(0.05)
    assert bound.of(MOST) == after


def test_grows_again_only_where_a_step_was_full() -> None:
    bound = AdaptiveBound(MARKS)
    for _ in range(20):
        bound.waited(0.5)
    small = bound.of(MOST)
    for _ in range(100):
        bound.stepped(is_full=False)
        bound.waited(0.0)
    assert bound.of(MOST) == small
    for _ in range(200):
        bound.stepped(is_full=True)
        bound.waited(0.0)
    assert bound.of(MOST) == MOST


def test_grows_back_while_nobody_comes_at_all() -> None:
    bound = AdaptiveBound(MARKS)
    for _ in range(8):
        bound.waited(0.5)
    assert bound.of(MOST) < MOST // 2
    for _ in range(2_000):
        bound.stepped(is_full=True)
    assert bound.of(MOST) == MOST


def test_shrinks_once_below_what_steps_still_have() -> None:
    bound = AdaptiveBound(MARKS)
    for _ in range(5):
        bound.shrink_below(20, 64)
    assert bound.of(64) == 15


@pytest.mark.parametrize(("low_s", "high_s"), [(0.0, 0.1), (0.1, 0.1), (0.2, 0.1), (float("nan"), 0.1)])
def test_marks_that_make_no_sense_are_refused(low_s: float, high_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="queue_low_s"):
        QueueMarks(low_s, high_s).validate()
