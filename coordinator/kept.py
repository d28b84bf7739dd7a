"""Answers that outlive their calls: the same request, sent again under its id, reads its answer from the first event.

An answer is in here from its acceptance until `keep_s` after its end, or until nobody has read it for `keep_s` while it
was computed. Bounded in bytes: what is computed counts with what it may become, what has ended with what it is, and of
those the oldest that nobody reads go first.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from coordinator.event_log import EventLog
from coordinator.request_digest import digests_of, request_digest
from coordinator.token_columns import token_bytes
from kvrelay.errors import DuplicateRequestError, InvalidRequestError, OverloadedError
from kvrelay.inference import GenerateEvent, GenerateRequest, RequestFailed
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId

FIXED_BYTES = 2_048  # an answer without any token: its log, its name, its timer
TEXT_BYTES = 12  # of a token that is yet to come
NO_ROOM_RETRY_S = 1.0

Cancel = Callable[[str], None]  # ends a running request; takes why


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]  # as an event loop's call_later


@dataclass(slots=True)
class _Kept:
    request_id: RequestId
    tenant: str
    digests: frozenset[bytes]
    keep_s: float
    log: EventLog
    cancel: Cancel | None  # None: it has ended
    num_bytes: int
    num_readers: int = 0
    is_forgotten: bool = False  # not to be found any more; its bytes count while someone reads it
    timer: Timer | None = None


class Reader:
    """One client's reading of a kept answer."""

    def __init__(self, answer: _Kept, on_leave: Callable[[_Kept], None]) -> None:
        self._answer = answer
        self._on_leave = on_leave
        self._has_left = False

    def events(self) -> AsyncIterator[GenerateEvent]:
        """Every event from the first one on. Raises nothing."""
        return self._answer.log.events()

    def left(self) -> None:
        """The client reads no more; the answer goes on for its time."""
        if not self._has_left:
            self._has_left = True
            self._on_leave(self._answer)


class KeptAnswers:
    """Belongs to an event loop, whose `call_later` is `later`."""

    def __init__(self, max_bytes: int, later: Later, on_attach: Callable[[], None] = lambda: None) -> None:
        self._max_bytes = max_bytes
        self._later = later
        self._on_attach = on_attach
        self._answers: dict[RequestId, _Kept] = {}
        self._ended: dict[RequestId, _Kept] = {}  # of those, in the order of their ends
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def attach(self, request: GenerateRequest, tenant: str) -> Reader | None:
        """None when nothing is kept under the id. Raises DuplicateRequestError where it is another request's."""
        answer = self._answers.get(RequestId(request.request_id))
        if answer is None:
            return None
        if request.keep_s == 0 or request_digest(request, tenant) not in answer.digests:
            raise DuplicateRequestError(
                f"the id {request.request_id!r} is that of a request that runs or whose answer is kept, and this is "
                "not the same one sent again with keep_s; choose another id"
            )
        self._on_attach()
        return self._read(answer)

    def make_log(self, request: GenerateRequest, settled: SamplingParams) -> EventLog:
        """Makes room for an answer. Raises OverloadedError when what runs leaves none, InvalidRequestError when nothing
        could."""
        wanted = _bytes_at_most(request, settled)
        if wanted > self._max_bytes:
            raise InvalidRequestError(
                f"keep_s is {request.keep_s:g}, but the answer may take {wanted} bytes and this coordinator keeps "
                f"{self._max_bytes} (--max-kept-bytes); ask for fewer tokens, or leave keep_s out"
            )
        self._make_room(wanted)
        if self.num_bytes + wanted > self._max_bytes:
            raise OverloadedError(
                f"the requests that run with keep_s take all of the {self._max_bytes} bytes for kept answers; try "
                "again later, or leave keep_s out",
                retry_after_s=NO_ROOM_RETRY_S,
            )
        return EventLog()

    def add(
        self, request: GenerateRequest, settled: SamplingParams, tenant: str, log: EventLog, cancel: Cancel
    ) -> Reader:
        """Keeps the answer of a request that has been accepted. `cancel` ends it."""
        request_id = RequestId(request.request_id)
        digests, num_bytes = digests_of(request, settled, tenant), _bytes_at_most(request, settled)
        answer = _Kept(request_id, tenant, digests, request.keep_s, log, cancel, num_bytes)
        self._answers[request_id] = answer
        self.num_bytes += num_bytes
        return self._read(answer)

    def ended(self, request_id: RequestId) -> None:
        """Its log has its terminal event. One that failed and may be tried again is not kept: that would be in the way
        of the other try."""
        answer = self._answers.get(request_id)
        if answer is None:
            return
        answer.cancel = None
        self._count(answer, FIXED_BYTES + answer.log.num_bytes)
        end = answer.log.end
        if end is None or (isinstance(end, RequestFailed) and end.retryable):
            self._forget(answer)
            return
        self._ended[request_id] = answer
        self._set_timer(answer, self._forget)
        self._make_room(0)

    def forget(self, request_id: RequestId, tenant: str) -> bool:
        """Lets go of an answer that has ended; False when there is none of the tenant's."""
        answer = self._ended.get(request_id)
        if answer is None or answer.tenant != tenant:
            return False
        self._forget(answer)
        return True

    def close(self) -> None:
        """Keeps nothing that has ended any longer, and cancels no more."""
        for answer in list(self._answers.values()):
            self._forget(answer)

    def _read(self, answer: _Kept) -> Reader:
        answer.num_readers += 1
        if answer.cancel is not None:
            self._stop_timer(answer)
        return Reader(answer, self._left)

    def _left(self, answer: _Kept) -> None:
        answer.num_readers -= 1
        if answer.num_readers:
            return
        if answer.is_forgotten:
            self._count(answer, 0)
        elif answer.cancel is not None:
            self._set_timer(answer, self._give_up)
        else:
            self._make_room(0)

    def _give_up(self, answer: _Kept) -> None:
        cancel = answer.cancel
        self._forget(answer)
        if cancel is not None:
            cancel(f"nobody came back for the answer within {answer.keep_s:g} s")

    def _forget(self, answer: _Kept) -> None:
        self._stop_timer(answer)
        self._answers.pop(answer.request_id, None)
        self._ended.pop(answer.request_id, None)
        answer.is_forgotten = True
        if not answer.num_readers:
            self._count(answer, 0)

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self._max_bytes:
            oldest = next((answer for answer in self._ended.values() if not answer.num_readers), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _count(self, answer: _Kept, num_bytes: int) -> None:
        self.num_bytes += num_bytes - answer.num_bytes
        answer.num_bytes = num_bytes

    def _set_timer(self, answer: _Kept, then: Callable[[_Kept], None]) -> None:
        self._stop_timer(answer)
        answer.timer = self._later(answer.keep_s, lambda: then(answer))

    def _stop_timer(self, answer: _Kept) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
            answer.timer = None


def _bytes_at_most(request: GenerateRequest, settled: SamplingParams) -> int:
    """What the answers may take; more where their text is longer than TEXT_BYTES a token."""
    each = token_bytes(settled.logprobs) + TEXT_BYTES
    return FIXED_BYTES + math.ceil(request.n * (settled.max_tokens or 0) * each)
