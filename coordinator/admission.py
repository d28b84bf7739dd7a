"""Who waits for KV memory and who may try to get some now. Pure.

Tenants take turns by weight (`fairness`), a tenant's requests by priority and age (`queue`). Whose turn has come stands
in line, with one rule against starvation: once the head of the line was refused, nobody passes it, of whatever tenant:
all that wait compete for the same room. Without a refusal several try at once, so a slow node does not hold up the
others' requests.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable

from coordinator.fairness import DeficitRounds
from coordinator.places import Places
from coordinator.queue import Demand, TenantQueue, Ticket
from coordinator.queue_wait import AdmittedPace
from coordinator.retry_advice import RetryAdvice
from kvrelay.errors import OverloadedError

MAX_TRYING = 8  # Reserve calls in flight at once


class Admission:
    """`places` bounds new requests; ones that lost their decode node come back to the front, unbounded.

    A request for several answers has a place kept for each that does not wait yet; it counts as one taken.
    """

    def __init__(
        self, places: Places, rounds: DeficitRounds, advice: RetryAdvice, *, max_trying: int = MAX_TRYING
    ) -> None:
        self._places = places
        self._rounds = rounds
        self._advice = advice
        self._max_trying = max_trying
        self._line: OrderedDict[Ticket, None] = OrderedDict()  # those whose turn has come, and who came back
        self._queues: defaultdict[str, TenantQueue] = defaultdict(TenantQueue)
        self._num_queued = 0
        self._num_trying = 0
        self._num_changes = 0
        self._pace = AdmittedPace()

    @property
    def num_waiting(self) -> int:
        return len(self._line) + self._num_queued

    def most_places(self, tenant: str) -> int:
        """Answers of the tenant that may ever wait at a time."""
        return self._places.most(tenant)

    def retry_after_s(self, tenant: str) -> float:
        """Advice to one that waited for too long."""
        return self._advice.wait_s(tenant)

    def tokens_per_s(self, now: float) -> float | None:
        """Tokens that found room lately while others lacked it; None while too few did."""
        return self._pace.tokens_per_s(now)

    def wait_s(self, demand: Demand, num_tokens_free: int, now: float) -> float:
        """Predicted wait of one that came now, while nodes say they have room for `num_tokens_free` more: 0 where it is
        not known how fast room comes free. Takes O(what waits of the tenant's)."""
        pace = self._pace.tokens_per_s(now)
        if pace is None:
            return 0.0
        free = 0 if self._pace.lacks_room else num_tokens_free  # scattered, and too little for who waits
        return max(0.0, self._tokens_before(demand, now) + demand.num_tokens - free) / pace

    def _tokens_before(self, demand: Demand, now: float) -> float:
        """Wanted by all that would have their turn before it."""
        queue = self._queues.get(demand.tenant)
        own = 0 if queue is None else queue.num_tokens_before(demand.priority, now)
        others = sum(
            min(other.num_tokens, self._rounds.due_before(tenant, demand.tenant, own))
            for tenant, other in self._queues.items()
            if tenant != demand.tenant
        )
        return own + others + sum(ticket.demand.num_tokens for ticket in self._line)

    def check_room(
        self, tenant: str, now: float, *, num_places: int = 1, num_tokens: int = 0, request_id: str = ""
    ) -> None:
        """Raises OverloadedError when the queue has no room for so many more of the tenant's. Whoever is told when to
        come back, and does, with the same `request_id`, finds room more likely than others do."""
        num_kept = self._advice.num_kept(tenant, request_id, self._places.most(tenant), now, num_places)
        why_not = self._places.why_no_room(tenant, num_places, num_tokens, num_kept)
        if why_not:
            delay_s = self._advice.refused(tenant, request_id, num_places, num_tokens, now)
            raise OverloadedError(why_not, retry_after_s=delay_s)

    def got_in(self, tenant: str, request_id: str) -> None:
        """The request has its places and is waited for no more."""
        self._advice.got_in(tenant, request_id)

    def keep(self, tenant: str, now: float, num_places: int, num_tokens: int) -> None:
        """Sets places aside for answers that enter later, at the front; `check_room` says beforehand if they are to be
        had."""
        self._take(tenant, num_places, num_tokens, now)

    def give_back(self, tenant: str, num_places: int, num_tokens: int, now: float) -> None:
        """As many kept places are needed no more: their answers enter now, or never."""
        self._places.give_back(tenant, num_places, num_tokens)
        self._note_places(tenant, now)

    def enter(self, may_try: Callable[[], None], demand: Demand, now: float) -> Ticket:
        """Queues with its tenant's others, whether or not there is room."""
        ticket = Ticket(may_try, demand, now)
        self._take(demand.tenant, 1, demand.num_tokens, now)
        self._queues[demand.tenant].add(ticket)
        self._num_queued += 1
        self._rounds.wait(demand.tenant)
        self._call_next()
        return ticket

    def enter_in_front(
        self, may_try: Callable[[], None], demand: Demand, now: float, *, refused: bool = False
    ) -> Ticket:
        """Goes first: a request that was admitted before (its demand of tokens is 0, it has paid), or one more answer
        of one. `refused`: it was just refused, so it waits for a change first."""
        ticket = Ticket(may_try, demand, now, refused_at=self._num_changes if refused else None)
        self._take(demand.tenant, 1, demand.num_tokens, now)
        self._rounds.charge(demand.tenant, demand.num_tokens)
        self._line[ticket] = None
        self._line.move_to_end(ticket, last=False)
        self._call_next()
        return ticket

    def refused(self, ticket: Ticket, now: float) -> None:
        """No node had room; the ticket keeps its place and tries again after a change."""
        self._stop_trying(ticket)
        ticket.refused_at = ticket.tried_at
        self._pace.begin(now)
        self._advice.lack_room(now)
        self._call_next()

    def admitted(self, ticket: Ticket, now: float) -> None:
        """The ticket got its room and leaves."""
        if ticket in self._line:
            self._advice.waited(ticket.demand.tenant, now - ticket.entered_at)
            self._pace.admitted(ticket.demand.num_tokens, now)
            self._leave_line(ticket, now)

    def leave(self, ticket: Ticket, now: float) -> None:
        """Gave up, was cancelled or failed, and is not charged; leaving twice is harmless."""
        tenant = ticket.demand.tenant
        if ticket in self._line:
            self._rounds.refund(tenant, ticket.demand.num_tokens)
            self._leave_line(ticket, now)
        elif tenant in self._queues and self._queues[tenant].remove(ticket):
            self._left_queue(tenant)
            self._free(ticket.demand, now)
            self._note_end(now)

    def changed(self) -> None:
        """Room may have appeared: a node joined, its status changed, or a request ended."""
        self._num_changes += 1
        self._call_next()

    def _leave_line(self, ticket: Ticket, now: float) -> None:
        self._stop_trying(ticket)
        del self._line[ticket]
        self._free(ticket.demand, now)
        self._note_end(now)
        self._call_next()

    def _note_end(self, now: float) -> None:
        if not self.num_waiting:
            self._pace.end(now)
            self._advice.have_room(now)

    def _stop_trying(self, ticket: Ticket) -> None:
        self._num_trying -= ticket.trying
        ticket.trying = False

    def _take(self, tenant: str, num_places: int, num_tokens: int, now: float) -> None:
        if num_places and not self._places.taken(tenant).num_places:
            self._advice.begin(tenant, now)
        self._places.take(tenant, num_places, num_tokens)

    def _free(self, demand: Demand, now: float) -> None:
        self._places.give_back(demand.tenant, 1, demand.num_tokens)
        self._advice.freed(demand.tenant, demand.num_tokens, now)
        self._note_places(demand.tenant, now)

    def _note_places(self, tenant: str, now: float) -> None:
        if not self._places.taken(tenant).num_places:
            self._advice.end(tenant, now)

    def _call_next(self) -> None:
        for ticket in self._turns():
            ticket.trying, ticket.tried_at = True, self._num_changes
            self._num_trying += 1
            ticket.may_try()

    def _turns(self) -> list[Ticket]:
        """Looks at no more tickets than may try at once, and one."""
        turns: list[Ticket] = []
        num_free = self._max_trying - self._num_trying
        for ticket in self._line:
            if len(turns) >= num_free:
                return turns
            if not ticket.trying and ticket.refused_at != self._num_changes:
                turns.append(ticket)
            if ticket.refused_at is not None:
                return turns  # it was refused before: the rest wait behind it
        while len(turns) < num_free and (tenant := self._rounds.next()) is not None:
            turns.append(self._take_turn(tenant))
        return turns

    def _take_turn(self, tenant: str) -> Ticket:
        ticket = self._queues[tenant].take()
        self._rounds.charge(tenant, ticket.demand.num_tokens)
        self._left_queue(tenant)
        self._line[ticket] = None
        return ticket

    def _left_queue(self, tenant: str) -> None:
        self._num_queued -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._rounds.rest(tenant)
