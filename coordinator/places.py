"""How much may wait, of one tenant and of all together: answers and the tokens they want. Pure, O(1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.tenant_policy import TenantPolicies

OnCount = Callable[[str, int, int], None]  # tenant, and how many answers and tokens of it wait more, or fewer


@dataclass(slots=True)
class Taken:
    """What waits, and what is kept for answers that enter later."""

    num_places: int = 0
    num_tokens: int = 0


class Places:
    """Every named tenant is owed its part of the places by weight: others take no place that would leave it with less,
    so that whoever floods the queue fills no more than what nobody is owed. 0 tokens are no bound."""

    def __init__(
        self,
        policies: TenantPolicies,
        max_places: int,
        max_tokens: int = 0,
        on_count: OnCount = lambda tenant, num_places, num_tokens: None,
    ) -> None:
        self._policies = policies
        self._max_places = max_places
        self._max_tokens = max_tokens
        self._on_count = on_count
        self._parts = policies.parts(max_places)
        self._all = Taken()
        self._by_tenant: defaultdict[str, Taken] = defaultdict(Taken)
        self._num_owed = sum(self._parts.values())  # to all whose part is not taken up

    @property
    def num_taken(self) -> int:
        return self._all.num_places

    def taken(self, tenant: str) -> Taken:
        return self._by_tenant.get(tenant, Taken())

    def most(self, tenant: str) -> int:
        """Places that the tenant can ever have at a time."""
        left = self._max_places - sum(self._parts.values()) + self._parts.get(tenant, 0)
        return min(left, self._policies.of(tenant).max_queued or left)

    def why_no_room(self, tenant: str, num_places: int, num_tokens: int, num_kept: int = 0) -> str:
        """Empty when there is room for so many more, with `num_kept` places of the tenant's left free. What alone wants
        more tokens than may wait enters when nothing else of its tenant waits, or else it never could."""
        own, policy = self.taken(tenant), self._policies.of(tenant)
        if policy.max_queued and own.num_places + num_kept + num_places > policy.max_queued:
            return _too_many(own.num_places, num_places, num_kept, policy.max_queued, f"tenant {tenant!r} may queue")
        num_owed = self._num_owed - self._owed(tenant, own.num_places)
        if self._all.num_places + num_owed + num_kept + num_places > self._max_places:
            kept = num_owed + num_kept
            return _too_many(self._all.num_places, num_places, kept, self._max_places, "this coordinator queues")
        for taken, most, whose in (
            (own, policy.max_queued_tokens, f"of tenant {tenant!r} "),
            (self._all, self._max_tokens, ""),
        ):
            if most and own.num_places and taken.num_tokens + num_tokens > most:
                return (
                    f"answers of {taken.num_tokens} tokens {whose}wait already, and {num_tokens} more would be over "
                    f"the {most} that may; try again later"
                )
        return ""

    def take(self, tenant: str, num_places: int, num_tokens: int) -> None:
        """Whether or not there is room: who was in before comes back."""
        self._count(tenant, num_places, num_tokens)

    def give_back(self, tenant: str, num_places: int, num_tokens: int) -> None:
        self._count(tenant, -num_places, -num_tokens)

    def _count(self, tenant: str, num_places: int, num_tokens: int) -> None:
        own = self._by_tenant[tenant]
        self._num_owed -= self._owed(tenant, own.num_places)
        for taken in (own, self._all):
            taken.num_places += num_places
            taken.num_tokens += num_tokens
        self._num_owed += self._owed(tenant, own.num_places)
        if not own.num_places:
            del self._by_tenant[tenant]
        self._on_count(tenant, num_places, num_tokens)

    def _owed(self, tenant: str, num_places: int) -> int:
        return max(0, self._parts.get(tenant, 0) - num_places)


def _too_many(num_taken: int, num_places: int, num_kept: int, most: int, whose: str) -> str:
    kept = f", where {num_kept} are kept for others" if num_kept else ""
    return (
        f"{num_taken} answers wait already, and {num_places} more would be over the {most} that {whose}{kept}; "
        "try again later"
    )
