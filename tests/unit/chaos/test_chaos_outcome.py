"""Which failures of a request are excused, and by what."""

from __future__ import annotations

import pytest

from kvrelay.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    KVRelayError,
    NotFoundError,
    UnavailableError,
)
from kvrelay.types import Role
from tests.chaos.asks import Ask, Leave
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import LATE_S, FaultRecord, Saboteur
from tests.chaos.load import Outcome, Try, outcome_of
from tests.chaos.plan import Fault, Kind, Victim
from tests.chaos.stalls import AFTER_S, StallWatch

STARTED, ENDED = 100.0, 190.0


def failed(
    error: KVRelayError, *, stalled_until: float | None = None, excused: bool = False, cancelled: bool = False
) -> Outcome:
    stalls = StallWatch()
    if stalled_until is not None:
        stalls.tick(stalled_until - 3.0, stalled_until)
    one = Try(Ask(0, 0, 0, 0, 0.0, Leave.CANCEL), 0, STARTED, [], cancel_sent_at=101.0 if cancelled else None)
    return outcome_of(one, error, ENDED, lambda *_: excused, stalls)


def saboteur_after(kind: Kind, began_at: float, recovered_at: float | None) -> Saboteur:
    saboteur = Saboteur(ChaosCluster.__new__(ChaosCluster), (), lambda *_: None)
    fault = Fault(0, 0.0, kind, Victim(Role.COORDINATOR, 0), 1.0)
    saboteur.records.append(FaultRecord(fault, began_at, recovered_at, recovered_at))
    return saboteur


def test_a_retryable_error_is_excused_by_the_death_of_its_coordinator() -> None:
    assert failed(UnavailableError("gone"), excused=True) is Outcome.FAILED
    assert failed(UnavailableError("gone")) is Outcome.WRONG
    assert failed(InvalidRequestError("what"), excused=True, stalled_until=ENDED) is Outcome.WRONG


def test_a_request_that_hangs_until_its_own_deadline_is_wrong_whatever_happened() -> None:
    assert failed(DeadlineError("90 s"), excused=True, stalled_until=ENDED) is Outcome.WRONG


def test_a_stall_excuses_what_fails_in_it_or_soon_after() -> None:
    assert failed(UnavailableError("gone"), stalled_until=ENDED - AFTER_S + 0.1) is Outcome.STALLED
    assert failed(UnavailableError("gone"), stalled_until=ENDED - AFTER_S - 0.1) is Outcome.WRONG


def test_only_cancelled_is_the_honest_end_of_a_request_that_was_cancelled() -> None:
    assert failed(CancelledError("as told"), cancelled=True) is Outcome.LEFT
    assert failed(CancelledError("by whom?")) is Outcome.WRONG
    assert failed(NotFoundError("no such request"), cancelled=True) is Outcome.WRONG


@pytest.mark.parametrize(
    ("began_at", "recovered_at", "is_excused"),
    [(105.0, 110.0, False), (180.0, 189.0, True), (180.0, ENDED - LATE_S - 0.1, False), (189.0, None, True)],
)
def test_a_fault_long_before_the_end_is_no_excuse(
    began_at: float, recovered_at: float | None, is_excused: bool
) -> None:
    assert saboteur_after(Kind.KILL, began_at, recovered_at).excuses(0, ENDED, accepted=True) is is_excused


def test_a_fault_excuses_its_own_victim_and_a_drain_what_was_not_accepted() -> None:
    assert not saboteur_after(Kind.KILL, 189.0, None).excuses(1, ENDED, accepted=True)
    assert not saboteur_after(Kind.SLOW, 189.0, None).excuses(0, ENDED, accepted=False)
    assert not saboteur_after(Kind.TERMINATE, 189.0, None).excuses(0, ENDED, accepted=True)
    assert saboteur_after(Kind.TERMINATE, 189.0, None).excuses(0, ENDED, accepted=False)
