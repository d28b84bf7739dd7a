"""What each tenant is due while not everyone can be let in: its part, by weight, of what is. Pure; times are seconds of
one clock.

What was let in is remembered for about half a minute, tenant by tenant. Tenants that were refused a moment ago want
more than they get. What the others take, they take; the rest is due, by weight, to those that want more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.last_heard import LastHeard
from coordinator.queue_wait import AdmittedPace

MEMORY_S = 30.0  # what was let in so long ago counts 1/e
WANTS_S = 5.0  # a tenant wants more for so long after a refusal
TOLERANCE = 0.05  # what a tenant may have more than another, over weight, and still not be ahead of it
_MAX_TENANTS = 1_000  # whose tokens, and whose refusals, are remembered


@dataclass(slots=True)
class _Account:
    """Tokens let in, as of `at`; older ones count less."""

    tokens: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        return self.tokens * math.exp(min(0.0, self.at - now) / MEMORY_S)

    def add(self, num_tokens: int, now: float) -> None:
        self.tokens, self.at = self.now(now) + num_tokens, now


class Dues:
    """`weight_of` gives a tenant's weight. Each call takes O(tenants that want more, or had some lately)."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._accounts = LastHeard(_Account, _MAX_TENANTS)  # in the order in which something of them was let in
        self._all = _Account()
        self._wanting: dict[str, float] = {}  # until when; the longest unheard of first
        self._pace = AdmittedPace()

    def let_in(self, tenant: str, num_tokens: int, num_positions: int, now: float) -> None:
        """`num_tokens` are what it is charged, `num_positions` what the pace is told in."""
        self._pass_on(now)
        self._accounts.of(tenant).add(num_tokens, now)
        self._all.add(num_tokens, now)
        self._pace.admitted(num_positions, now)

    def refused(self, tenant: str, now: float) -> None:
        """A request that would have been let in at another time."""
        self._pass_on(now)
        self._pace.begin(now)
        self._wanting.pop(tenant, None)
        self._wanting[tenant] = now + WANTS_S
        if len(self._wanting) > _MAX_TENANTS:
            del self._wanting[next(iter(self._wanting))]

    def positions_per_s(self, now: float) -> float | None:
        """Let in, of all tenants', while some want more; None while too few were."""
        self._pass_on(now)
        return self._pace.tokens_per_s(now)

    def part(self, tenant: str, now: float) -> float:
        """Of all that is let in, what the tenant is due if it wants more; never less than by weight among all that had
        some lately, whatever those took."""
        self._pass_on(now)
        wanting = {*self._wanting, tenant}
        total = self._all.now(now)
        theirs = min(1.0, sum(self._had(name, now) for name in wanting) / total) if total else 1.0
        least = 1 / sum(map(self._weight_of, wanting.union(self._lately(now))))
        return self._weight_of(tenant) * max(theirs / sum(map(self._weight_of, wanting)), least)

    def _lately(self, now: float) -> Iterator[str]:
        """Tenants of which something was let in while that counts, the last first."""
        for name, account in reversed(self._accounts):
            if account.at <= now - MEMORY_S:
                return
            yield name

    def is_ahead(self, tenant: str, now: float) -> bool:
        """Another wants more and has had less, over weight."""
        self._pass_on(now)
        return any(self.is_behind(name, tenant, now) for name in self._wanting if name != tenant)

    def is_behind(self, tenant: str, other: str, now: float) -> bool:
        """It wants more and has had less than the other, over weight."""
        self._pass_on(now)
        if tenant not in self._wanting:
            return False
        had, limit = self._had(tenant, now), self._had(other, now)
        return had / self._weight_of(tenant) * (1 + TOLERANCE) < limit / self._weight_of(other)

    def _had(self, tenant: str, now: float) -> float:
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.now(now)

    def _pass_on(self, now: float) -> None:
        while self._wanting and (until := next(iter(self._wanting.values()))) < now:
            del self._wanting[next(iter(self._wanting))]
            if not self._wanting:
                self._pace.end(until)
