"""When to come back: what those who were turned away are told, and the places that are kept for them. Pure.

A delay is worth nothing if the place that comes free meanwhile goes to whoever asks first. So it is worked out from how
fast places came free, in turn after all that were turned away before, and the place is kept: from shortly before the
time told until shortly after it, for the same request id of the same tenant.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from coordinator.heap import Heap
from coordinator.stopwatch import Stopwatch

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0  # nothing is promised for later than that
GRACE_S = 2.0  # a place is kept so long after the time told
LEAD_S = 3.0  # and from so long before it: places come free in bursts, and none while a large request is at the head
_EARLY_S = 0.5  # that somebody may come before the time told and be in time
_LATE_S = 0.25  # that nobody may begin in front of one that can hardly wait, and has not come
_MOST_DOUBLED = 4  # times that the delay of one that came in vain is doubled
MAX_PROMISES = 16_384  # a tenant
_LEAD_PLACES = 4  # where they come slowly, it is kept from when so many more shall come free until its time
_NUM_FREED = 64  # places that came free last, by which the pace is told
MARGIN = 1.25  # what is told, of what is expected


class Paced(Protocol):
    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float | None:
        """Until so many places, with so many tokens, come free; None while it is not known."""
        ...


class Pace:
    """How fast places come free while somebody waits for room.

    Those that come free in another time, as when a burst fills nodes that were idle, say little of that, and count only
    while nothing better is known.
    """

    def __init__(self) -> None:
        self._any = _Freed()  # of this wait
        self._lacking = _Freed()  # of all, by the time in which room lacked
        self._watch = Stopwatch()

    def begin(self, now: float) -> None:
        """The queue was empty and is no more."""
        self._any = _Freed()
        self._any.begin(now)

    def lack(self, now: float) -> None:
        """What waits finds no room from now on."""
        self._watch.start(now)
        self._lacking.begin(self._watch.elapsed(now))

    def rest(self, now: float) -> None:
        """Nothing waits, or nothing lacks room any more."""
        self._watch.stop(now)

    def freed(self, num_tokens: int, now: float) -> None:
        self._any.add(num_tokens, now)
        if self._watch.runs:
            self._lacking.add(num_tokens, self._watch.elapsed(now))

    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float | None:
        """Until so many places, with so many tokens, come free; None while none did."""
        expected_s = self._lacking.seconds_for(num_places, num_tokens, self._watch.elapsed(now))
        return self._any.seconds_for(num_places, num_tokens, now) if expected_s is None else expected_s


class _Freed:
    """The places that came free last."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int]] = deque(maxlen=_NUM_FREED + 1)  # when, tokens; the first is the start

    def begin(self, now: float) -> None:
        """Does nothing once it has begun."""
        if not self._moments:
            self._moments.append((now, 0))

    def add(self, num_tokens: int, now: float) -> None:
        self._moments.append((now, num_tokens))

    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float | None:
        if len(self._moments) < 2:
            return None
        span = max(now - self._moments[0][0], 1e-3)
        tokens_freed = sum(tokens for _, tokens in itertools.islice(self._moments, 1, None))
        return span * max(num_places / (len(self._moments) - 1), num_tokens / max(tokens_freed, 1))


@dataclass(slots=True)
class _Promise:
    num_places: int
    due: float
    patience_s: float  # that it can wait when it has come
    num_missed: int = 0  # times that it came when it was told to, and found no room

    @property
    def begun_by(self) -> float:
        return self.due + self.patience_s


class Promises:
    """One tenant's. In order of time; what is told later is never due earlier. What is called places may be anything
    that comes free at a pace; they are kept from `lead_s` before the time told."""

    def __init__(self, lead_s: float = LEAD_S) -> None:
        self._lead_s = lead_s
        self._later: OrderedDict[str, _Promise] = OrderedDict()
        self._soon: OrderedDict[str, _Promise] = OrderedDict()  # places are kept for these
        self._num_soon = 0  # places
        self._by_patience = Heap[str]()  # the soon ones, by when they have to begin
        self._last_due = 0.0

    def __len__(self) -> int:
        return len(self._later) + len(self._soon)

    def num_kept(self, request_id: str, pace: Paced, now: float, num_places: int = 1) -> int:
        """Places that a request for so many has to leave to others: none when its own time has come, and if it comes
        early those of the ones before it; all, if it wants more than it was promised."""
        self._pass_on(pace, now)
        promise = self._soon.get(request_id)
        if promise is None or num_places > promise.num_places:
            return self._num_soon
        if self._is_due(request_id, now):
            return 0
        before = itertools.takewhile(lambda other: other != request_id, self._soon)
        return sum(self._soon[other].num_places for other in before)

    def begun_by(self, now: float, pace: Paced) -> float:
        """When the first of those that are to come soon can wait no longer; infinite where there is none. Who has not
        come in time does not count."""
        self._pass_on(pace, now)
        while (first := self._by_patience.least()) is not None:
            promise = self._soon[first]
            if now <= min(promise.begun_by, promise.due + _LATE_S):
                return promise.begun_by
            self._by_patience.remove(first)
        return math.inf

    def tell(
        self,
        request_id: str,
        num_places: int,
        num_tokens: int,
        pace: Paced,
        guess_s: float,
        now: float,
        at_least_s: float = MIN_RETRY_AFTER_S,
        patience_s: float = math.inf,
    ) -> float:
        """The delay in seconds for a request that was turned away, which is promised its places where it has an id.
        `guess_s` holds while no pace is known; no delay is under `at_least_s`; then it can wait for `patience_s`."""
        self._pass_on(pace, now)
        known = self._soon.get(request_id) or self._later.get(request_id)
        if known is not None and num_places > known.num_places:
            self.forget(request_id)  # it is another request by now
        elif known is not None:
            return self._tell_again(request_id, known, now, at_least_s)
        expected = pace.seconds_for(num_places, num_tokens, now)
        # After the last one that was told, not by this moment's pace for all of them: many would be told the same.
        due = max(self._last_due, now) + (guess_s if expected is None else expected * MARGIN)
        due = max(due, now + at_least_s)
        if request_id and due - now <= MAX_RETRY_AFTER_S and len(self) < MAX_PROMISES:
            self._later[request_id] = _Promise(num_places, due, patience_s)
            self._last_due = due
            return due - now
        return MAX_RETRY_AFTER_S if request_id else min(due - now, MAX_RETRY_AFTER_S)

    def forget(self, request_id: str) -> None:
        """It came and got in."""
        for promises in (self._soon, self._later):
            promise = promises.pop(request_id, None)
            if promise is not None and promises is self._soon:
                self._num_soon -= promise.num_places
                self._by_patience.remove(request_id)
            if promise is not None and promise.due == self._last_due:
                self._last_due = self._latest_due()

    def waits_for(self, request_id: str, now: float) -> bool:
        """Whether it was told to come about now."""
        return request_id in self._soon and self._is_due(request_id, now)

    def _latest_due(self) -> float:
        """Or else who comes next would go on being told to wait behind those that came early, and are served."""
        for promises in (self._later, self._soon):
            if promises:
                return promises[next(reversed(promises))].due
        return 0.0

    def _is_due(self, request_id: str, now: float) -> bool:
        """A moment before is in time: clocks differ."""
        return now >= self._soon[request_id].due - _EARLY_S

    def _tell_again(self, request_id: str, promise: _Promise, now: float, at_least_s: float) -> float:
        """Who comes early is told the rest; who comes in time and finds no room goes on being waited for, each time for
        twice as long: what it lacks may not be a moment."""
        if promise.due - now < MIN_RETRY_AFTER_S:  # then it is among the soon ones
            promise.due = now + at_least_s * 2 ** min(promise.num_missed, _MOST_DOUBLED)
            promise.num_missed += 1
            self._soon.move_to_end(request_id)
            self._by_patience.rank(request_id, (promise.begun_by,))
        return promise.due - now

    def _pass_on(self, pace: Paced, now: float) -> None:
        lead = max(self._lead_s, pace.seconds_for(_LEAD_PLACES, 0, now) or 0.0)
        while self._later and (first := next(iter(self._later.values()))).due <= now + lead:
            request_id, _ = self._later.popitem(last=False)
            self._soon[request_id] = first
            self._num_soon += first.num_places
            self._by_patience.rank(request_id, (first.begun_by,))
        while self._soon and next(iter(self._soon.values())).due + GRACE_S < now:
            self.forget(next(iter(self._soon)))
