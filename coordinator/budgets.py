"""What each tenant may use in a day: tokens of prompts and answers, as they are billed. Pure; told the time of day.

A day is one of UTC. Who has used up the budget gets nothing new until the next; what runs then goes on to its end, so a
tenant may use more than its budget by what it has in work at a time. Each coordinator counts what it serves itself.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from coordinator.tenant_policy import TenantPolicies
from kvrelay.errors import BudgetSpentError

logger = logging.getLogger(__name__)

DAY_S = 86_400
ALERT_PART = 0.8  # of a budget, when its use is worth a warning
MAX_TENANTS = 10_000  # of more, those that are longest unheard of begin anew


class Watch(Protocol):
    """Who hears of what is used."""

    def new_day(self) -> None: ...
    def used(self, tenant: str, part: float) -> None: ...
    def alerted(self, tenant: str) -> None: ...


class DailyBudgets:
    """`clock` gives seconds since 1970. `watch` hears of each use, and once a day of each tenant that comes to
    ALERT_PART."""

    def __init__(self, policies: TenantPolicies, clock: Callable[[], float], watch: Watch) -> None:
        self._policies = policies
        self._clock = clock
        self._watch = watch
        self._day = 0  # since 1970
        self._spent: OrderedDict[str, int] = OrderedDict()  # tokens on that day

    def __len__(self) -> int:
        """Tenants that are kept account of."""
        return len(self._spent)

    def check(self, tenant: str) -> None:
        """Raises BudgetSpentError when nothing is left of the day's budget."""
        self._begin_day()
        budget, spent = self._policies.of(tenant).daily_tokens, self._spent.get(tenant, 0)
        if budget and spent >= budget:
            raise BudgetSpentError(
                f"tenant {tenant!r} has used {spent} of its {budget} tokens a day; there are more at midnight UTC",
                retry_after_s=DAY_S - self._clock() % DAY_S,
            )

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens of a prompt or an answer."""
        budget = self._policies.of(tenant).daily_tokens
        if not budget:
            return
        self._begin_day()
        before = self._spent.get(tenant, 0)
        spent = self._spent[tenant] = before + num_tokens
        self._spent.move_to_end(tenant)
        if len(self._spent) > MAX_TENANTS:
            self._spent.popitem(last=False)
        self._watch.used(tenant, spent / budget)
        if before < budget * ALERT_PART <= spent:
            logger.warning(
                "tenant %r has used %d of its %d tokens a day; at all of them it gets nothing new until midnight UTC",
                *(tenant, spent, budget),
            )
            self._watch.alerted(tenant)

    def _begin_day(self) -> None:
        """A clock that is set back by a day or less does not give that day's tokens again. One that is set back by more
        was wrong before."""
        today = int(self._clock() // DAY_S)
        if today > self._day or today < self._day - 1:
            self._day = today
            self._spent.clear()
            self._watch.new_day()
