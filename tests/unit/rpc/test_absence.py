"""A coordinator that comes later or ends in good order is no warning; one that stays away, or refuses, is one."""

from __future__ import annotations

import logging

from kvrelay.errors import ForeignBlockError, UnavailableError
from kvrelay.rpc.absence import Absence
from tests.support.manual_clock import ManualClock

REFUSED = UnavailableError("Connection refused")


def test_a_coordinator_that_is_not_up_yet_is_told_of_once_and_warned_of_only_after_some_seconds() -> None:
    clock = ManualClock()
    absence = Absence("c:7400", clock)

    first = absence.failed(REFUSED, was_joined=False)
    assert first == (logging.INFO, "the coordinator at c:7400 does not answer yet; trying until it does")
    clock.now += 4.9
    assert absence.failed(REFUSED, was_joined=False) is None
    clock.now += 0.1
    assert absence.failed(REFUSED, was_joined=False) == (
        logging.WARNING,
        "not joined to the coordinator at c:7400 for 5 s, still trying: Connection refused",
    )
    clock.now += 60.0
    assert absence.failed(REFUSED, was_joined=False) is None


def test_an_orderly_end_is_told_of_in_our_own_words_and_its_time_counts_anew() -> None:
    clock = ManualClock()
    absence = Absence("c:7400", clock)
    absence.failed(REFUSED, was_joined=False)
    clock.now += 60.0
    absence.over()

    line = absence.failed(UnavailableError("Cancelling all calls"), was_joined=True)
    assert line == (logging.INFO, "the coordinator at c:7400 is gone; joining again as soon as it is back")
    assert absence.failed(REFUSED, was_joined=False) is None
    clock.now += 5.0
    again = absence.failed(REFUSED, was_joined=False)
    assert again is not None
    assert again[0] == logging.WARNING


def test_a_refusal_is_a_warning_at_once_and_every_reason_is_told_once() -> None:
    absence = Absence("c:7400", ManualClock())
    refusals = [ForeignBlockError(reason) for reason in ("another model", "another model", "another layout")]

    assert [absence.failed(error, was_joined=False) for error in refusals] == [
        (logging.WARNING, "the coordinator at c:7400 refuses this node: another model"),
        None,
        (logging.WARNING, "the coordinator at c:7400 refuses this node: another layout"),
    ]
