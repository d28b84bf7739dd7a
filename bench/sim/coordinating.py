"""The coordinator in virtual time: its own queue, fairness, promises, members, prefix index and ranking of nodes.

What its coroutines do between those (placement.py, attempt.py) is told here as events: a try asks for a decode node's
reservation, then for a prefill node's place; calls take time, and all that is known of nodes is their last status.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.clock import VirtualClock
from bench.sim.decoding import DecodeNode
from bench.sim.placing import Placing
from bench.sim.prefilling import PrefillNode
from bench.sim.request import Outcome, SimRequest
from bench.sim.reserving import Reserving
from bench.sim.shapes import NodeShape
from coordinator.admission import Admission
from coordinator.cluster import LOOK_AGAIN_S
from coordinator.members import COMPUTING_ROLES, Member, Members
from coordinator.prefix_index import PrefixIndex
from coordinator.queue import Demand
from coordinator.router import has_slot
from kvrelay.cluster import CacheEvents, NodeStatus
from kvrelay.errors import OverloadedError
from kvrelay.types import BlockHash, InstanceId, Role


@dataclass(slots=True)
class Books:
    """What the coordinator knows of caches, and what it took to decide."""

    caches: dict[Role, PrefixIndex] = field(default_factory=lambda: {role: PrefixIndex() for role in COMPUTING_ROLES})
    decisions_s: list[float] = field(default_factory=list)  # of the processor, to rank the nodes for one try
    num_reserves: int = 0  # calls


class Coordinator:
    """`prefill` and `decode` are the nodes themselves: reached by calls only, whose results come later. `ended` is
    called with each request once, whatever became of it."""

    def __init__(
        self,
        clock: VirtualClock,
        shape: NodeShape,
        members: Members,
        admission: Admission,
        *,
        placing: Placing,
        reserving: Reserving,
        local_tail_tokens: int,
        max_queue_wait_s: float,
        ended: Callable[[SimRequest], None],
    ) -> None:
        self.prefill: dict[InstanceId, PrefillNode] = {}
        self.decode: dict[InstanceId, DecodeNode] = {}
        self.books = Books()
        self._clock = clock
        self._shape = shape
        self._members = members
        self._admission = admission
        self._placing = placing
        self._reserving = reserving
        self._local_tail_tokens = local_tail_tokens
        self._max_queue_wait_s = max_queue_wait_s
        self._ended = ended
        self._will_look_again = False

    def seen(self, member: Member, status: NodeStatus) -> None:
        """A node's status came."""
        if self._members.update(member, status, self._clock.now):
            self._admission.changed()

    def told(self, member: Member, events: CacheEvents) -> None:
        """A node told of blocks that came and went; no such message is ever lost."""
        is_missing = self.books.caches[member.info.role].apply(member.info.instance_id, events, self._clock.now)
        assert not is_missing, f"{member.info.address} lost count of its blocks"

    def ask(self, request: SimRequest) -> None:
        """A request is at the door."""
        arrival, now = request.arrival, self._clock.now
        num_tokens = self._num_tokens_wanted(request)
        try:
            self._admission.check_room(arrival.tenant, now, num_tokens=num_tokens, request_id=request.request_id)
        except OverloadedError as error:
            request.told_s = error.retry_after_s
            self._end(request, Outcome.TURNED_AWAY)
            return
        self._admission.got_in(arrival.tenant, request.request_id)
        request.entered_at = now
        request.ticket = self._admission.enter(
            lambda: self._clock.at(self._clock.now, self._try, request), Demand(arrival.tenant, num_tokens), now
        )
        self._clock.after(self._max_queue_wait_s, self._give_up, request)

    def finished(self, request: SimRequest) -> None:
        """A decode node drew its last token."""
        self._clock.after(self._shape.call_s, self._hear_of_end, request)

    def handed_over(self, request: SimRequest) -> None:
        """Its KV is at the decode node."""
        assert request.decode_node is not None
        self.decode[request.decode_node].commit(request)

    def prefill_refused(self, request: SimRequest, busy: frozenset[InstanceId]) -> None:
        """The prefill node has no place for it, nor had those in `busy`."""
        assert request.prefill_node is not None
        self._send_to_prefill(request, busy | {request.prefill_node})

    # Its turn

    def _num_tokens_wanted(self, request: SimRequest) -> int:
        hashes = request.prompt_hashes
        found = (self._cached(role, hashes) for role in COMPUTING_ROLES)
        num_blocks = max((blocks for cached in found for blocks in cached.values()), default=0)
        num_uncached = request.arrival.num_prompt - num_blocks * self._shape.block_tokens
        return max(num_uncached, 1) + request.arrival.max_tokens

    def _try(self, request: SimRequest) -> None:
        if request.ticket is None:
            return  # it gave up
        request.num_tries += 1
        started = time.thread_time()
        candidates = self._prefill_candidates(request)
        has_place = any(map(has_slot, candidates))
        cached = self._cached(Role.DECODE_NODE, request.prompt_hashes)
        most_cached = max(cached.values(), default=0) * self._shape.block_tokens
        order = []
        if has_place or self._is_tail(request, most_cached):
            order = self._decode_candidates(request, cached)
        self.books.decisions_s.append(time.thread_time() - started)
        self._reserve_on(request, order, 0, has_place)

    def _cached(self, role: Role, hashes: list[BlockHash]) -> dict[InstanceId, int]:
        return self.books.caches[role].match(hashes, self._clock.now)

    def _prefill_candidates(self, request: SimRequest) -> list[Member]:
        members = self._members.usable(Role.PREFILL_NODE)
        cached = self._cached(Role.PREFILL_NODE, request.prompt_hashes)
        num_blocks = self._shape.blocks_for(request.arrival.num_prompt)
        return self._placing.prefill(request, members, cached, num_blocks)

    def _decode_candidates(self, request: SimRequest, cached: dict[InstanceId, int]) -> list[Member]:
        members = self._members.usable(Role.DECODE_NODE)
        longest = self._shape.blocks_for(request.arrival.num_prompt + request.arrival.max_tokens)
        now = self._shape.blocks_for(self._num_reserved(request))
        return self._placing.decode(request, members, cached, longest, now)

    def _num_reserved(self, request: SimRequest) -> int:
        return request.arrival.num_prompt + self._reserving.num_output(request.arrival)

    def _is_tail(self, request: SimRequest, num_cached: int) -> bool:
        return request.arrival.num_prompt - num_cached <= self._local_tail_tokens

    def _reserve_on(self, request: SimRequest, order: list[Member], place: int, has_place: bool) -> None:
        if place == len(order):
            self._no_room(request)
            return
        self._clock.after(self._shape.call_s, self._reserve, request, order, place, has_place)

    def _reserve(self, request: SimRequest, order: list[Member], place: int, has_place: bool) -> None:
        """At the node."""
        self.books.num_reserves += 1
        node = self.decode[order[place].info.instance_id]
        num_cached = node.reserve(request, self._num_reserved(request))
        if num_cached is None:
            self._clock.after(self._shape.call_s, self._reserve_on, request, order, place + 1, has_place)
        else:
            self._clock.after(self._shape.call_s, self._granted, request, order[place], num_cached, has_place)

    def _granted(self, request: SimRequest, member: Member, num_cached_blocks: int, has_place: bool) -> None:
        node = self.decode[member.info.instance_id]
        request.num_cached_decode = num_cached_blocks * self._shape.block_tokens
        is_tail = self._is_tail(request, request.num_cached_decode)
        if request.ticket is None or not (has_place or is_tail):
            self._clock.after(self._shape.call_s, node.release, request)
            if request.ticket is not None:
                self._no_room(request)
            return
        self._assigned(member, request)
        self._admission.admitted(request.ticket, self._clock.now)
        request.ticket = None
        request.granted_at = request.granted_at or self._clock.now
        request.decode_node, request.is_tail = member.info.instance_id, is_tail
        if is_tail:
            self._clock.after(self._shape.call_s, node.compute, request)
        else:
            self._send_to_prefill(request, frozenset())

    def _no_room(self, request: SimRequest) -> None:
        if request.ticket is not None:
            self._admission.refused(request.ticket)
            self._look_again()

    def _look_again(self) -> None:
        if not self._will_look_again:
            self._will_look_again = True
            self._clock.after(LOOK_AGAIN_S, self._looks_again)

    def _looks_again(self) -> None:
        self._will_look_again = False
        self._admission.changed()

    # Computing

    def _send_to_prefill(self, request: SimRequest, busy: frozenset[InstanceId]) -> None:
        candidates = self._prefill_candidates(request)
        member = next((member for member in candidates if member.info.instance_id not in busy), None)
        if member is None:
            self._queue_again(request)
            return
        request.prefill_node = member.info.instance_id
        self._assigned(member, request)
        node = self.prefill[member.info.instance_id]
        self._clock.after(self._shape.call_s, node.submit, request, busy)

    def _queue_again(self, request: SimRequest) -> None:
        """Every prefill node became busy in between: back to the front of the queue."""
        assert request.decode_node is not None
        self._clock.after(self._shape.call_s, self.decode[request.decode_node].release, request)
        request.decode_node = request.prefill_node = None
        request.ticket = self._admission.enter_in_front(
            lambda: self._clock.at(self._clock.now, self._try, request),
            Demand(request.arrival.tenant, num_tokens=0),
            self._clock.now,
            refused=True,
        )
        self._look_again()

    def _assigned(self, member: Member, request: SimRequest) -> None:
        member.num_assigned += 1
        index = self.books.caches[member.info.role]
        index.assigned(member.info.instance_id, request.prompt_hashes, self._clock.now)

    # Its end

    def _hear_of_end(self, request: SimRequest) -> None:
        self._reserving.finished(request.arrival)
        self._end(request, Outcome.FINISHED)
        self._admission.changed()

    def _give_up(self, request: SimRequest) -> None:
        if request.ticket is not None:
            self._admission.leave(request.ticket, self._clock.now)
            request.ticket = None
            self._end(request, Outcome.GAVE_UP)

    def _end(self, request: SimRequest, outcome: Outcome) -> None:
        request.outcome = outcome
        request.ended_at = self._clock.now
        self._ended(request)
