"""Leases, attempts and the end of reservations, on a clock of the test's own."""

import pytest

from decode_node.reservations import Phase, Reservations
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import AlreadyCommittedError, DuplicateRequestError, NotFoundError, StaleError
from kvrelay.types import BlockHash, BlockId, ReservationId
from tests.support.fake_engine import make_request

A, B = ReservationId("a"), ReservationId("b")


def granted(*ids: ReservationId, now: float = 0.0, lease_s: float = 10.0) -> Reservations:
    reservations = Reservations(lease_s)
    for reservation_id in ids:
        sequence = Sequence.create(make_request((10, 11)), BlockHash(bytes(32)), 4)
        reservations.grant(reservation_id, sequence, (BlockId(0),), 0, now)
    return reservations


def test_a_lease_lapses_when_nobody_renews_it() -> None:
    reservations = granted(A)
    assert reservations.next_deadline() == 10.0
    assert reservations.expire(9.9) == []
    assert [entry.reservation_id for entry in reservations.expire(10.0)] == [A]
    assert reservations.end(A) is None
    assert reservations.next_deadline() is None


def test_renewing_moves_one_lease() -> None:
    reservations = granted(A, B)
    assert reservations.renew(A, 6.0) == 10.0
    assert [entry.reservation_id for entry in reservations.expire(12.0)] == [B]
    assert reservations.next_deadline() == 16.0


def test_a_lapsed_lease_cannot_be_renewed_opened_or_received() -> None:
    reservations = granted(A)
    reservations.expire(10.0)
    with pytest.raises(NotFoundError, match="a does not exist or has ended"):
        reservations.renew(A, 10.0)
    with pytest.raises(NotFoundError, match="a does not exist or has ended"):
        reservations.open(A, compute_tail=False)
    with pytest.raises(StaleError, match="its KV is not wanted"):
        reservations.begin_receive(A, 0, 10.0)


def test_every_frame_renews_the_lease() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 8.0)
    assert reservations.next_deadline() == 18.0
    reservations.check_receive(A, 0, 17.0)
    assert reservations.next_deadline() == 27.0


def test_a_frame_after_the_lease_is_refused() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 0.0)
    reservations.expire(10.0)
    with pytest.raises(StaleError, match="does not exist or has ended"):
        reservations.check_receive(A, 0, 10.0)
    reservations.break_receive(A, 0)


def test_an_open_decode_call_keeps_the_lease() -> None:
    reservations = granted(A)
    reservations.open(A, compute_tail=False)
    assert reservations.next_deadline() is None
    assert reservations.expire(1e9) == []


def test_a_second_decode_call_is_refused() -> None:
    reservations = granted(A)
    reservations.open(A, compute_tail=False)
    with pytest.raises(DuplicateRequestError, match="answer read already"):
        reservations.open(A, compute_tail=False)


def test_a_newer_attempt_supersedes_one_that_is_under_way() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 0.0)
    reservations.begin_receive(A, 1, 1.0)
    with pytest.raises(StaleError, match="attempt 0 of reservation a is over: 1 has begun"):
        reservations.check_receive(A, 0, 2.0)
    with pytest.raises(StaleError, match="attempt 0 of reservation a is over"):
        reservations.begin_commit(A, 0, 2.0)
    reservations.break_receive(A, 0)  # the old stream's end is no news of the new one
    assert reservations.check_receive(A, 1, 2.0).phase is Phase.RECEIVING


@pytest.mark.parametrize("attempt", [0, 3])
def test_an_attempt_that_began_or_is_older_cannot_begin(attempt: int) -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 3, 0.0)
    reservations.break_receive(A, 3)
    with pytest.raises(StaleError, match=f"attempt {attempt} of reservation a is over: 3 has begun"):
        reservations.begin_receive(A, attempt, 0.0)


def test_a_broken_stream_leaves_the_reservation_granted_for_the_next_attempt() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 0.0)
    reservations.break_receive(A, 0)
    with pytest.raises(StaleError):
        reservations.check_receive(A, 0, 0.0)
    assert reservations.begin_receive(A, 1, 0.0).phase is Phase.RECEIVING


def test_nothing_is_received_once_the_commit_began() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 0.0)
    reservations.begin_commit(A, 0, 0.0)
    with pytest.raises(AlreadyCommittedError, match="has its KV already"):
        reservations.begin_receive(A, 1, 0.0)
    with pytest.raises(StaleError):
        reservations.check_receive(A, 0, 0.0)
    reservations.break_receive(A, 0)
    assert reservations.num_pending == 1
    reservations.committed(A)
    assert reservations.num_pending == 0
    with pytest.raises(AlreadyCommittedError, match="has its KV already"):
        reservations.begin_receive(A, 1, 0.0)


def test_a_tail_can_be_computed_only_where_nothing_was_received() -> None:
    reservations = granted(A, B)
    assert reservations.open(A, compute_tail=True).phase is Phase.COMMITTED
    with pytest.raises(AlreadyCommittedError, match="has its KV already"):
        reservations.begin_receive(A, 0, 0.0)
    reservations.begin_receive(B, 0, 0.0)
    with pytest.raises(StaleError, match="b is receiving"):
        reservations.open(B, compute_tail=True)


def test_a_reservation_ends_exactly_once() -> None:
    reservations = granted(A, B)
    entry = reservations.end(A)
    assert entry is not None
    assert entry.reservation_id == A
    assert reservations.end(A) is None
    assert [entry.reservation_id for entry in reservations.expire(1e9)] == [B]
    assert reservations.end(B) is None
    assert reservations.expire(1e9) == []
    assert (len(reservations), reservations.ids) == (0, ())


def test_news_of_an_ended_reservation_is_ignored() -> None:
    reservations = granted(A)
    reservations.begin_receive(A, 0, 0.0)
    reservations.begin_commit(A, 0, 0.0)
    reservations.end(A)
    reservations.committed(A)
    reservations.break_receive(A, 0)
    assert len(reservations) == 0
