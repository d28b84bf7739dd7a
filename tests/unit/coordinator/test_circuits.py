"""Who is asked last after failures, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.circuits import Circuits, Party, failed_between, is_fault
from kvrelay import errors
from kvrelay.errors import (
    AlreadyCommittedError,
    BadLogitsError,
    BudgetSpentError,
    CancelledError,
    CorruptBlockError,
    DeadlineError,
    HandoffFailedError,
    InvalidRequestError,
    KVRelayError,
    NeverFitsError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    StaleError,
    StructureError,
    TargetOutOfReachError,
    UnavailableError,
)
from kvrelay.types import InstanceId

P1, P2, D1, D2 = (InstanceId(name) for name in ("p1", "p2", "d1", "d2"))
GONE = UnavailableError("gone")


def opened(*party: InstanceId, now: float = 0.0) -> Circuits:
    circuits = Circuits()
    assert not circuits.failed(party, GONE, now)
    assert circuits.failed(party, GONE, now)
    return circuits


def test_one_failure_condemns_nobody_and_two_in_a_row_do() -> None:
    circuits = Circuits()
    assert not circuits.failed((D1,), GONE, 0.0)
    assert (D1,) not in circuits.suspects(0.0)
    circuits.succeeded((D1,))
    assert not circuits.failed((D1,), GONE, 0.0)
    assert (D1,) not in circuits.suspects(0.0)
    assert circuits.failed((D1,), GONE, 0.0)
    assert (D1,) in circuits.suspects(0.0)
    assert circuits.num_open == 1


def test_a_link_that_failed_says_nothing_of_its_ends_nor_of_their_other_links() -> None:
    circuits = opened(P1, D1)
    assert circuits.suspects(0.0) == {(P1, D1)}


def test_after_a_pause_one_request_tries_while_the_others_go_elsewhere() -> None:
    circuits = opened(D1)
    assert (D1,) in circuits.suspects(0.9)
    assert (D1,) not in circuits.suspects(1.0)
    assert (D1,) not in circuits.suspects(1.0)  # to look is not to try
    circuits.trying((D1,), 1.0)
    assert (D1,) in circuits.suspects(1.0)
    circuits.succeeded((D1,))
    assert (D1,) not in circuits.suspects(1.0)
    assert circuits.num_open == 0


def test_a_failed_trial_doubles_the_pause() -> None:
    circuits = opened(D1)
    circuits.trying((D1,), 1.0)
    assert not circuits.failed((D1,), GONE, 1.0)  # it was open before: nothing to log
    assert (D1,) in circuits.suspects(2.9)
    assert (D1,) not in circuits.suspects(3.0)


def test_one_that_is_used_although_it_is_open_does_not_stay_open_longer_for_it() -> None:
    """Where all are open the best is used: those uses are no trials."""
    circuits = opened(D1)
    for now in (0.1, 0.2, 0.3):
        circuits.trying((D1,), now)
        circuits.failed((D1,), GONE, now)
    assert (D1,) not in circuits.suspects(1.0)


def test_a_process_that_is_gone_is_forgotten_with_its_links() -> None:
    circuits = opened(P1, D1)
    for party in [(D1,), (P2, D1), (P1, D2)]:
        for _ in range(2):
            circuits.failed(party, GONE, 0.0)
    circuits.forget(D1)
    assert circuits.num_open == 1
    assert (P1, D2) in circuits.suspects(0.0)


NO_FAULT = {
    InvalidRequestError,
    BudgetSpentError,
    PromptTooLongError,
    StructureError,
    NeverFitsError,
    OverloadedError,
    CancelledError,
    NotFoundError,
    StaleError,
    TargetOutOfReachError,
    AlreadyCommittedError,
    BadLogitsError,
    DeadlineError,
}


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_what_counts(kind: type) -> None:
    if not issubclass(kind, KVRelayError):
        return
    assert is_fault(kind("")) == (kind not in NO_FAULT)
    assert failed_between(kind("")) == (kind in (HandoffFailedError, CorruptBlockError))


def test_what_is_nobodys_fault_never_opens() -> None:
    circuits = Circuits()
    for kind in NO_FAULT:
        for _ in range(3):
            assert not circuits.failed((D1,), kind("no"), 0.0)
    assert (D1,) not in circuits.suspects(0.0)


PARTIES: list[Party] = [(P1,), (P2,), (D1,), (P1, D1), (P2, D1)]
EVENTS = st.lists(st.tuples(st.sampled_from(PARTIES), st.sampled_from(["ok", "fail", "busy", "try", "wait"])))


@given(EVENTS)
def test_only_two_faults_in_a_row_open_and_success_or_time_always_helps(events: list[tuple[Party, str]]) -> None:
    circuits, now = Circuits(), 0.0
    in_a_row = dict.fromkeys(PARTIES, 0)
    for party, event in events:
        if event == "ok":
            circuits.succeeded(party)
            in_a_row[party] = 0
        elif event == "fail":
            in_a_row[party] += 1
            assert circuits.failed(party, GONE, now) == (in_a_row[party] == 2)
        elif event == "busy":
            assert not circuits.failed(party, OverloadedError("busy"), now)
        elif event == "try":
            circuits.trying(party, now)
        else:
            now += 0.7
        for one in PARTIES:
            assert in_a_row[one] >= 2 or one not in circuits.suspects(now)
        assert circuits.num_open == sum(number >= 2 for number in in_a_row.values())
    assert not circuits.suspects(now + 30.0)


def test_suspects_are_the_nodes_and_links_that_should_be_asked_last_now() -> None:
    circuits = Circuits()
    for _ in range(2):
        circuits.failed((P1, D1), GONE, now=0.0)
        circuits.failed((D2,), GONE, now=0.5)
    circuits.failed((P2,), GONE, now=0.5)
    assert circuits.suspects(0.9) == {(P1, D1), (D2,)}
    assert circuits.suspects(1.2) == {(D2,)}
