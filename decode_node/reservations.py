"""Reservations and their leases: who may still send KV, and until when the blocks are kept.

A state machine over plain data; times are passed in. It lives on the event loop, as the frames do that it judges: a
reservation ends here first and gives its blocks back on the engine afterwards, so no frame can be written late.

    GRANTED <-> RECEIVING -> COMMITTING -> COMMITTED        from every phase: ended, exactly once
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvrelay.engine.sequence import Sequence
from kvrelay.errors import AlreadyCommittedError, DuplicateRequestError, NotFoundError, StaleError
from kvrelay.types import BlockId, ReservationId


class Phase(Enum):
    GRANTED = "granted"  # blocks are set aside; no stream is filling them
    RECEIVING = "receiving"  # the stream of `attempt` fills them
    COMMITTING = "committing"  # the engine has been told to take them over
    COMMITTED = "committed"  # they belong to a sequence of the engine


@dataclass(slots=True, eq=False)
class Entry:
    """One reservation. `deadline` does not count while its answer is read (`decoding`)."""

    reservation_id: ReservationId
    sequence: Sequence  # the event loop's until COMMITTING, the engine's from then on
    block_ids: tuple[BlockId, ...]
    num_cached: int  # leading blocks that are shared with a cache and never written
    deadline: float
    phase: Phase = Phase.GRANTED
    attempt: int = -1  # the latest handoff attempt that began
    decoding: bool = False


class Reservations:
    """Every live reservation of the node. Times are seconds of one monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._entries: dict[ReservationId, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_pending(self) -> int:
        """Reservations whose KV is not committed. Any thread may ask: the copy is one step of the interpreter's."""
        return sum(entry.phase is not Phase.COMMITTED for entry in tuple(self._entries.values()))

    @property
    def ids(self) -> tuple[ReservationId, ...]:
        return tuple(self._entries)

    def grant(
        self,
        reservation_id: ReservationId,
        sequence: Sequence,
        block_ids: tuple[BlockId, ...],
        num_cached: int,
        now: float,
    ) -> Entry:
        """Starts a lease over blocks that the pool has set aside."""
        entry = Entry(reservation_id, sequence, block_ids, num_cached, now + self.lease_s)
        self._entries[reservation_id] = entry
        return entry

    def get(self, reservation_id: ReservationId) -> Entry:
        """Raises NotFoundError."""
        entry = self._entries.get(reservation_id)
        if entry is None:
            raise NotFoundError(f"reservation {reservation_id} does not exist or has ended")
        return entry

    def renew(self, reservation_id: ReservationId, now: float) -> float:
        """Seconds until the lease lapses now. Raises NotFoundError."""
        self.get(reservation_id).deadline = now + self.lease_s
        return self.lease_s

    def open(self, reservation_id: ReservationId, *, compute_tail: bool) -> Entry:
        """Its answer is read from now on; until it ends the lease cannot lapse.

        With `compute_tail` the engine takes the blocks over as they are. Raises NotFoundError, or
        DuplicateRequestError for a second reader, or StaleError if a handoff fills the blocks already.
        """
        entry = self.get(reservation_id)
        if entry.decoding:
            raise DuplicateRequestError(f"reservation {reservation_id} has its answer read already")
        if compute_tail:
            if entry.phase is not Phase.GRANTED:
                raise StaleError(
                    f"reservation {reservation_id} is {entry.phase.value}; its tail cannot be computed here"
                )
            entry.phase = Phase.COMMITTED
        entry.decoding = True
        return entry

    def begin_receive(self, reservation_id: ReservationId, attempt: int, now: float) -> Entry:
        """A handoff begins; it supersedes an older attempt that is still under way.

        Raises StaleError for an attempt that comes too late, AlreadyCommittedError for one that is not needed.
        """
        entry = self._live(reservation_id)
        if entry.phase in (Phase.COMMITTING, Phase.COMMITTED):
            raise AlreadyCommittedError(
                f"reservation {reservation_id} has its KV already; attempt {attempt} is not needed"
            )
        if attempt <= entry.attempt:
            raise StaleError(f"attempt {attempt} of reservation {reservation_id} is over: {entry.attempt} has begun")
        entry.attempt = attempt
        entry.phase = Phase.RECEIVING
        entry.deadline = now + self.lease_s
        return entry

    def check_receive(self, reservation_id: ReservationId, attempt: int, now: float) -> Entry:
        """Whether this attempt may write now; renews the lease. Raises StaleError once it may not."""
        entry = self._live(reservation_id)
        if entry.attempt != attempt or entry.phase is not Phase.RECEIVING:
            raise StaleError(f"attempt {attempt} of reservation {reservation_id} is over: {entry.attempt} has begun")
        entry.deadline = now + self.lease_s
        return entry

    def break_receive(self, reservation_id: ReservationId, attempt: int) -> None:
        """The stream of this attempt ended without a commit: another attempt may come. Late news is ignored."""
        entry = self._entries.get(reservation_id)
        if entry is not None and entry.attempt == attempt and entry.phase is Phase.RECEIVING:
            entry.phase = Phase.GRANTED

    def begin_commit(self, reservation_id: ReservationId, attempt: int, now: float) -> Entry:
        """Every block is proven; from now on the engine owns the sequence. Raises StaleError."""
        entry = self.check_receive(reservation_id, attempt, now)
        entry.phase = Phase.COMMITTING
        return entry

    def committed(self, reservation_id: ReservationId) -> None:
        """The engine did it. News of an ended reservation is ignored."""
        entry = self._entries.get(reservation_id)
        if entry is not None:
            entry.phase = Phase.COMMITTED

    def end(self, reservation_id: ReservationId) -> Entry | None:
        """Takes it out; the caller has its blocks given back. None if it ended before."""
        return self._entries.pop(reservation_id, None)

    def expire(self, now: float) -> list[Entry]:
        """Ends every reservation whose lease has lapsed."""
        lapsed = [entry for entry in self._leased() if entry.deadline <= now]
        for entry in lapsed:
            del self._entries[entry.reservation_id]
        return lapsed

    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        return min((entry.deadline for entry in self._leased()), default=None)

    def _leased(self) -> list[Entry]:
        return [entry for entry in self._entries.values() if not entry.decoding]

    def _live(self, reservation_id: ReservationId) -> Entry:
        entry = self._entries.get(reservation_id)
        if entry is None:
            raise StaleError(f"reservation {reservation_id} does not exist or has ended; its KV is not wanted")
        return entry
