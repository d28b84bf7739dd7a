"""How many answers each tenant, and each key, has open at a time, against what it may have. Pure, O(1)."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from coordinator.identity import Identity
from coordinator.tenant_policy import TenantPolicies
from kvrelay.errors import OverloadedError

T = TypeVar("T")

RETRY_AFTER_S = 1.0  # one of its own answers has to end first; how soon, it knows better


class OpenAnswers:
    """Open answers wait for room or are computed; those of a request for several are counted until its end."""

    def __init__(self, policies: TenantPolicies) -> None:
        self._policies = policies
        self._by_tenant: Counter[str] = Counter()
        self._by_key: Counter[tuple[str, str]] = Counter()  # tenant and key: two issuers may name a subject alike

    def check(self, caller: Identity, n: int) -> None:
        """Raises OverloadedError, naming the limit, where `n` more would be too many."""
        tenant = caller.tenant.label
        self._check(f"tenant {tenant!r}", self._by_tenant[tenant], n, self._policies.of(tenant).max_open)
        self._check(f"key {caller.name!r}", self._by_key[tenant, caller.name], n, caller.limits.max_open)

    @staticmethod
    def _check(whose: str, num_open: int, n: int, most: int) -> None:
        if most and num_open + n > most:
            raise OverloadedError(
                f"{whose} has {num_open} answers open and asks for {n} more; its max_open is {most}",
                retry_after_s=RETRY_AFTER_S,
            )

    def began(self, caller: Identity, n: int) -> None:
        self._by_tenant[caller.tenant.label] += n
        self._by_key[caller.tenant.label, caller.name] += n

    def ended(self, caller: Identity, n: int) -> None:
        """What has none open is forgotten."""
        _take_off(self._by_tenant, caller.tenant.label, n)
        _take_off(self._by_key, (caller.tenant.label, caller.name), n)


def _take_off(counts: Counter[T], name: T, n: int) -> None:
    counts[name] -= n
    if not counts[name]:
        del counts[name]
