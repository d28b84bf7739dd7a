"""Which tenant's turn it is: weighted deficit round robin over tokens. Pure; no clock, rounds are its time.

In each round a tenant that waits is credited its quantum, in proportion to its weight, and has turns until its credit
is used up. The last turn may overdraw it, and what it owes is taken from its next rounds: so the order does not depend
on what a turn will cost, and a request that leaves unserved can be refunded. (Surplus round robin: Adiseshu, Parulkar
and Varghese, "A Reliable and Scalable Striping Protocol", 1996; the bounds are those of Shreedhar and Varghese,
"Efficient Fair Queuing using Deficit Round Robin", 1995.) Rounds in which nobody has a turn are skipped in one step, so
a turn costs O(log tenants) however small the quantum is.

Over any time in which a tenant waits, it gets the quanta of the rounds that pass, within one quantum and one largest
request of its own. So two that both wait never differ, in tokens over weight, by more than two quanta of weight 1 and
each one's largest request over its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.heap import Heap

QUANTUM_TOKENS = 512  # a round's credit at weight 1; a tenant with more weight has more turns in a row
_SLACK = 64  # accounts of tenants that wait for nothing, kept without a look at whether they still owe


@dataclass(slots=True)
class _Account:
    """Above -(the largest request) and at most one quantum, as of `round`."""

    credit: int
    round: int  # the last one that was credited


class DeficitRounds:
    """`weight_of` gives a tenant's weight; it stays the same."""

    def __init__(self, weight_of: Callable[[str], float], quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._weight_of = weight_of
        self._quantum_tokens = quantum_tokens
        self._round = 0
        self._accounts: dict[str, _Account] = {}
        self._waiting: Heap[str] = Heap()  # by the round of the next turn
        self._num_in_debt = 0  # accounts that the last look for even ones left

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    def wait(self, tenant: str) -> None:
        """Something of the tenant waits; its first turn comes after those of tenants that wait already, but for credit
        that it has left of this round."""
        if tenant not in self._waiting:
            self._rank(tenant, self._account(tenant))

    def rest(self, tenant: str) -> None:
        """Nothing of the tenant waits. What credit it has left lapses with the round; what it owes it goes on owing."""
        self._account(tenant)
        self._waiting.remove(tenant)
        if len(self._accounts) > 2 * (len(self._waiting) + self._num_in_debt) + _SLACK:
            self._forget_the_even()

    def next(self) -> str | None:
        """Whose turn it is; None when nobody waits. `charge` says what the turn took."""
        tenant = self._waiting.least()
        if tenant is not None:
            self._round = self._waiting.key_of_least()[0]
            self._account(tenant)
        return tenant

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Takes the tokens from the tenant's credit, in its turn or out of it."""
        account = self._account(tenant)
        account.credit -= num_tokens
        if tenant in self._waiting and account.credit <= 0:
            self._rank(tenant, account)

    def refund(self, tenant: str, num_tokens: int) -> None:
        """What was charged is not used after all. Credit beyond a quantum is not given: it would be a burst."""
        account = self._account(tenant)
        account.credit = min(account.credit + num_tokens, self._quantum(tenant))
        if tenant in self._waiting:
            self._rank(tenant, account)

    def due_before(self, other: str, tenant: str, num_tokens: int) -> float:
        """Tokens that `other`, which waits, has turns for until `tenant` had as many as `num_tokens` and is next."""
        rounds = max(0, num_tokens - self._credit(tenant)) / self._quantum(tenant)
        return max(0.0, rounds * self._quantum(other) + self._credit(other))

    def _credit(self, tenant: str) -> int:
        """As of this round; leaves no account behind."""
        return self._account(tenant).credit if tenant in self._accounts else 0

    def _quantum(self, tenant: str) -> int:
        return max(1, round(self._quantum_tokens * self._weight_of(tenant)))

    def _rank(self, tenant: str, account: _Account) -> None:
        """By the first round in which it has credit: this one while any is left."""
        num_rounds = 0 if account.credit > 0 else 1 + -account.credit // self._quantum(tenant)
        self._waiting.rank(tenant, (account.round + num_rounds,))

    def _account(self, tenant: str) -> _Account:
        """The tenant's account as of this round. While it did not wait, rounds only paid what it owed."""
        account = self._accounts.setdefault(tenant, _Account(0, self._round))
        if account.round < self._round:
            account.credit += (self._round - account.round) * self._quantum(tenant)
            account.round = self._round
            if tenant not in self._waiting:
                account.credit = min(account.credit, 0)
        return account

    def _forget_the_even(self) -> None:
        """A tenant that owes nothing begins like a new one."""
        for tenant in [name for name in self._accounts if name not in self._waiting]:
            if self._account(tenant).credit >= 0:
                del self._accounts[tenant]
        self._num_in_debt = len(self._accounts) - len(self._waiting)
