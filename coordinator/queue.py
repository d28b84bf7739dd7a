"""What waits for its first turn, tenant by tenant. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.heap import Heap
from kvrelay.types import DEFAULT_TENANT

# So long must a request have waited to be level with one that comes now and has one point of priority more. From the
# least priority to the greatest that makes 50 s, less than a request waits at most by default.
AGEING_S = 0.25


@dataclass(frozen=True, slots=True)
class Demand:
    """What one answer wants: `num_tokens` are the prompt's that no cache is known to have, and max_tokens."""

    tenant: str = DEFAULT_TENANT
    num_tokens: int = 1
    priority: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue. `may_try` is called when it is this one's turn to ask for a reservation."""

    may_try: Callable[[], None]
    demand: Demand
    entered_at: float
    trying: bool = False
    refused_at: int | None = None  # the change count when its last, refused, try began
    tried_at: int = 0


class TenantQueue:
    """One tenant's tickets, the next one first: by priority, to which waiting adds.

    A ticket is passed only by ones of more priority that come within AGEING_S for each point they have more. So one of
    priority p waits for those that came before it, for those that come in the (MAX_PRIORITY - p) x AGEING_S seconds
    after it, and for no others: a steady stream of urgent requests, however dense, starves nobody.
    """

    def __init__(self) -> None:
        self._tickets: Heap[Ticket] = Heap()
        self.num_tokens = 0  # that they want

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        self._tickets.rank(ticket, (_level(ticket.demand.priority, ticket.entered_at),))
        self.num_tokens += ticket.demand.num_tokens

    def remove(self, ticket: Ticket) -> bool:
        """Whether it waited here."""
        found = self._tickets.remove(ticket)
        self.num_tokens -= ticket.demand.num_tokens * found
        return found

    def num_tokens_before(self, priority: int, now: float) -> int:
        """Wanted by those that would go before one of that priority that came now."""
        level = _level(priority, now)
        return sum(
            ticket.demand.num_tokens
            for ticket in self._tickets
            if _level(ticket.demand.priority, ticket.entered_at) <= level
        )

    def take(self) -> Ticket:
        """The next one, which leaves. Raises LookupError when nobody waits."""
        ticket = self._tickets.least()
        if ticket is None:
            raise LookupError("nobody waits")
        self.remove(ticket)
        return ticket


def _level(priority: int, entered_at: float) -> float:
    """The lower goes first."""
    return entered_at - priority * AGEING_S
