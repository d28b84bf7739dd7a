"""Bursts far over what the nodes hold, in virtual time, and what becomes of those who come back as told."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

from coordinator.admission import Admission
from coordinator.fairness import DeficitRounds
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.retry_advice import RetryAdvice
from coordinator.tenant_policy import TenantPolicies
from kvrelay.errors import OverloadedError

NUM_AT_A_TIME, ANSWER_S, RESERVE_S = 60, 4.0, 0.02
BURST, BETWEEN_S, BURSTS_APART_S = 300, 0.004, 60.0


class Bursts:
    """Of one tenant; 32 may wait."""

    def __init__(self) -> None:
        policies = TenantPolicies()
        self._admission = Admission(Places(policies, 32), DeficitRounds(policies.weight), RetryAdvice())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._draw = random.Random(1)
        self._now = 0.0
        self._num_running = 0
        self.num_returned: Counter[int] = Counter()  # once, by burst
        self.num_let_in: Counter[int] = Counter()  # of those

    def run(self, num_bursts: int) -> None:
        for burst in range(num_bursts):
            for number in range(BURST):
                at = burst * BURSTS_APART_S + number * BETWEEN_S
                self._at(at, lambda burst=burst, number=number: self._arrive(burst, number, 0))  # type: ignore[misc]
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), happen))

    def _arrive(self, burst: int, number: int, num_tries: int) -> None:
        request_id = f"{burst}-{number}"
        self.num_returned[burst] += num_tries == 1
        try:
            self._admission.check_room("a", self._now, request_id=request_id)
        except OverloadedError as error:
            if num_tries < 8:
                at = self._now + error.retry_after_s
                self._at(at, lambda: self._arrive(burst, number, num_tries + 1))
            return
        self._admission.got_in("a", request_id)
        self.num_let_in[burst] += num_tries == 1
        entered: list[Ticket] = []
        may_try = lambda: self._at(self._now + RESERVE_S, lambda: self._try(entered[0]))  # noqa: E731
        entered.append(self._admission.enter(may_try, Demand("a", 200), self._now))

    def _try(self, ticket: Ticket) -> None:
        if self._num_running == NUM_AT_A_TIME:
            self._admission.refused(ticket, self._now)
            return
        self._num_running += 1
        self._admission.admitted(ticket, self._now)
        self._at(self._now + ANSWER_S * self._draw.uniform(0.7, 1.3), self._end)

    def _end(self) -> None:
        self._num_running -= 1
        self._admission.changed()


def test_from_the_second_burst_on_who_comes_back_as_told_gets_in() -> None:
    bursts = Bursts()
    bursts.run(3)
    for burst in (1, 2):
        assert bursts.num_returned[burst] > 150
        assert bursts.num_let_in[burst] >= 0.8 * bursts.num_returned[burst]
