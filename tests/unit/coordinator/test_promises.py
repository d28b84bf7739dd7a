"""When to come back, and that a place is kept for who does."""

from __future__ import annotations

import math

import pytest

from coordinator.promises import MAX_PROMISES, MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Pace, Promises
from coordinator.retry_advice import RetryAdvice

WAITING = (("a", 1.5), ("b", 0.5))  # and how long each can wait when it has come


def steady(interval_s: float, num_freed: int = 10) -> Pace:
    """A place of 100 tokens came free every so often, the last one now, at 0."""
    pace = Pace()
    pace.begin(-interval_s * num_freed)
    for number in range(num_freed):
        pace.freed(100, -interval_s * (num_freed - 1 - number))
    return pace


class FixedPace(Pace):
    """Goes on as it was, however long nothing is noted."""

    def __init__(self, interval_s: float) -> None:
        super().__init__()
        self._interval_s = interval_s

    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float:
        return num_places * self._interval_s


def test_the_pace_is_that_of_the_last_places() -> None:
    pace = steady(2.0)
    assert pace.seconds_for(3, 0, 0.0) == pytest.approx(6.0)
    assert pace.seconds_for(1, 450, 0.0) == pytest.approx(9.0)
    assert pace.seconds_for(1, 0, 20.0) == pytest.approx(4.0), "none came free since"
    pace.begin(30.0)
    assert pace.seconds_for(1, 0, 31.0) is None


def test_the_pace_forgets_what_is_long_past() -> None:
    pace = steady(10.0, num_freed=50)
    for number in range(1, 101):
        pace.freed(100, number * 0.5)
    assert pace.seconds_for(1, 0, 50.0) == pytest.approx(0.5)


def test_each_is_told_a_time_after_the_one_before() -> None:
    promises, pace = Promises(), steady(2.0)
    told = [promises.tell(f"r{number}", 1, 0, pace, 1.0, now=0.0) for number in range(3)]
    assert told == pytest.approx([2.5, 5.0, 7.5])
    assert promises.tell("n4", 4, 0, pace, 1.0, now=0.0) == pytest.approx(17.5)


def test_without_a_pace_the_guess_is_told_and_never_less_than_a_second() -> None:
    promises = Promises()
    assert promises.tell("a", 1, 0, Pace(), 7.0, now=0.0) == pytest.approx(7.0)
    assert Promises().tell("b", 1, 0, steady(0.01), 7.0, now=0.0) == pytest.approx(MIN_RETRY_AFTER_S)


def test_a_place_is_kept_around_the_time_told_and_no_longer() -> None:
    promises, pace = Promises(), FixedPace(0.5)
    told = [promises.tell(request_id, 16, 0, pace, 1.0, now=0.0) for request_id in "ab"]
    assert told == pytest.approx([10.0, 20.0])
    assert promises.num_kept("new", pace, 6.9) == 0
    assert promises.num_kept("new", pace, 7.1) == 16
    assert promises.num_kept("new", pace, 9.6) == 16
    assert promises.num_kept("a", pace, 9.6) == 0
    assert promises.num_kept("b", pace, 9.6) == 16
    assert promises.num_kept("new", pace, 11.9) == 16
    assert promises.num_kept("new", pace, 12.1) == 0, "a did not come"
    assert promises.num_kept("b", pace, 17.5) == 0, "early, and nobody is before it"
    assert promises.num_kept("new", pace, 20.0) == 16
    promises.forget("b")
    assert promises.num_kept("new", pace, 20.0) == 0
    assert len(promises) == 0


def test_where_places_come_slowly_one_is_kept_from_four_before() -> None:
    promises, pace = Promises(), FixedPace(10.0)
    assert promises.tell("a", 8, 0, pace, 1.0, now=0.0) == pytest.approx(100.0)
    assert promises.num_kept("new", pace, 59.0) == 0
    assert promises.num_kept("new", pace, 61.0) == 8


def test_one_that_comes_early_is_told_the_rest_and_one_that_finds_no_room_is_waited_for() -> None:
    promises, pace = Promises(), steady(8.0)
    assert promises.tell("a", 1, 0, pace, 1.0, now=0.0) == pytest.approx(10.0)
    assert promises.tell("a", 1, 0, pace, 1.0, now=4.0) == pytest.approx(6.0)
    assert promises.tell("a", 1, 0, pace, 1.0, now=10.0) == pytest.approx(1.0)
    assert promises.num_kept("new", pace, 12.9) == 1
    assert len(promises) == 1


def test_nobody_waits_behind_one_that_came_early_and_got_in() -> None:
    promises, pace = Promises(), FixedPace(10.0)
    told = [promises.tell(request_id, 1, 0, pace, 1.0, now=0.0) for request_id in "abc"]
    assert told == pytest.approx([12.5, 25.0, 37.5])
    promises.forget("b")
    assert promises.tell("d", 1, 0, pace, 1.0, now=0.0) == pytest.approx(50.0), "c is still to come"
    for request_id in "cd":
        promises.forget(request_id)
    assert promises.tell("e", 1, 0, pace, 1.0, now=0.0) == pytest.approx(25.0), "after a"
    for request_id in "ae":
        promises.forget(request_id)
    assert promises.tell("f", 1, 0, pace, 1.0, now=0.0) == pytest.approx(12.5)


def test_one_that_wants_more_than_it_was_promised_is_promised_anew() -> None:
    promises, pace = Promises(), FixedPace(2.0)
    for request_id in "ab":
        promises.tell(request_id, 1, 0, pace, 1.0, now=0.0)
    assert promises.num_kept("a", pace, 2.5, num_places=1) == 0
    assert promises.num_kept("a", pace, 2.5, num_places=2) == 2, "not the other's place too"
    assert promises.tell("a", 2, 0, pace, 1.0, now=2.5) == pytest.approx(7.5), "5 s after the other"
    assert promises.num_kept("new", pace, 2.5) == 1 + 2
    assert promises.num_kept("a", pace, 10.0, num_places=2) == 0


def test_who_chose_no_id_is_promised_nothing() -> None:
    promises, pace = Promises(), steady(2.0)
    assert promises.tell("", 1, 0, pace, 1.0, now=0.0) == pytest.approx(2.5)
    assert promises.tell("", 1, 0, pace, 1.0, now=0.0) == pytest.approx(2.5)
    assert len(promises) == 0


def test_promises_are_bounded_in_time_and_number() -> None:
    promises, slow = Promises(), steady(500.0)
    assert promises.tell("a", 1, 0, slow, 1.0, now=0.0) == MAX_RETRY_AFTER_S
    assert len(promises) == 0
    pace = steady(0.001)
    for number in range(MAX_PROMISES + 10):
        promises.tell(str(number), 1, 0, pace, 1.0, now=0.0)
    assert len(promises) == MAX_PROMISES
    assert promises.tell("one more", 1, 0, pace, 1.0, now=0.0) == MAX_RETRY_AFTER_S


def test_places_are_kept_from_half_the_queue_at_most() -> None:
    """If nobody comes back, the rest goes on being used."""
    advice = RetryAdvice()
    for number in range(20):
        advice.refused("a", str(number), 1, 0, now=0.0)
    assert advice.num_kept("a", "new", 10, now=3.0) == 5
    assert advice.num_kept("a", "0", 10, now=3.0) == 0, "its time has come"
    assert advice.num_kept("b", "new", 10, now=3.0) == 0, "what one tenant is promised, another does not pay for"


def fill(advice: RetryAdvice, at: float) -> None:
    """A burst finds ten places on idle nodes, within a tenth of a second, and then none."""
    advice.begin("a", at)
    for number in range(10):
        advice.freed("a", 100, at + number / 100)
    advice.lack_room(at + 0.1)


def test_how_fast_idle_nodes_are_filled_says_nothing_of_how_fast_room_comes_free() -> None:
    advice = RetryAdvice()
    fill(advice, 0.0)
    assert advice.refused("a", "first", 1, 0, now=0.1) == MIN_RETRY_AFTER_S, "nothing better is known"
    for number in range(1, 9):
        advice.freed("a", 100, 0.1 + 2.0 * number)
    advice.have_room(16.1)
    advice.end("a", 16.1)
    fill(advice, 3_600.0)
    assert advice.refused("a", "second", 1, 0, now=3_600.1) == pytest.approx(2.0 * 1.25)


def test_time_in_which_a_tenant_has_nothing_that_waits_does_not_slow_its_pace() -> None:
    """Others lack room all the while."""
    advice = RetryAdvice()
    advice.begin("b", 0.0)
    fill(advice, 0.0)
    advice.freed("a", 100, 2.1)
    advice.end("a", 2.1)
    advice.begin("a", 100.0)
    assert advice.refused("a", "one", 1, 0, now=100.0) == pytest.approx(2.0 * 1.25)


def test_tenants_long_unheard_of_are_forgotten() -> None:
    advice = RetryAdvice()
    advice.waited("first", 200.0)
    assert advice.wait_s("first") == pytest.approx(20.0)
    for number in range(1_000):
        advice.waited(f"t{number}", 1.0)
    assert advice.wait_s("first") == MIN_RETRY_AFTER_S


def test_what_takes_longer_to_come_in_reach_is_told_no_sooner() -> None:
    promises, pace = Promises(lead_s=1.0), FixedPace(0.5)
    assert promises.tell("one", 1, 0, pace, 1.0, now=0.0, at_least_s=9.0) == 9.0
    assert promises.tell("two", 1, 0, pace, 1.0, now=0.0, at_least_s=1.0) == 9.0 + 0.5 * 1.25
    assert promises.num_kept("new", pace, now=6.5) == 0, "the time is not near yet"
    assert promises.num_kept("new", pace, now=8.5) == 2
    assert not promises.waits_for("one", now=8.0)
    assert promises.waits_for("one", now=8.5)
    assert not promises.waits_for("new", now=8.5)


def test_until_when_those_can_wait_that_come_soon() -> None:
    promises, pace = Promises(), FixedPace(0.5)
    assert promises.begun_by(0.0, pace) == math.inf
    told = [promises.tell(name, 16, 0, pace, 1.0, 0.0, patience_s=patience_s) for name, patience_s in WAITING]
    assert told == pytest.approx([10.0, 20.0])
    assert promises.begun_by(6.0, pace) == math.inf, "neither comes within three seconds"
    assert promises.begun_by(8.0, pace) == pytest.approx(11.5)
    assert promises.begun_by(11.75, pace) == math.inf, "the first one has not come"
    assert promises.begun_by(18.0, pace) == pytest.approx(20.5)
    assert promises.tell("b", 16, 0, pace, 1.0, 20.0, at_least_s=3.0) == pytest.approx(3.0)
    assert promises.begun_by(20.0, pace) == pytest.approx(23.5), "it came, and shall come again"
    promises.forget("b")
    assert promises.begun_by(20.0, pace) == math.inf


def test_who_came_in_time_and_in_vain_is_told_twice_as_long_each_time() -> None:
    promises, pace, now, told = Promises(), FixedPace(1.0), 0.0, []
    for _ in range(8):
        told.append(promises.tell("a", 4, 0, pace, 1.0, now))
        now += told[-1]
    assert told == pytest.approx([5.0, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0])
