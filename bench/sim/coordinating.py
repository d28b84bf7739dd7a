"""The coordinator in virtual time: its own queue, fairness, promises, members, prefix index and ranking of nodes.

What its coroutines do between those (placement.py, attempt.py) is told here as events: a try asks for a decode node's
reservation, then for a prefill node's place; calls take time, and all that is known of nodes is their last status.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from bench.sim.clock import VirtualClock
from bench.sim.decoding import DecodeNode
from bench.sim.door import Door
from bench.sim.placing import Choice, Placing
from bench.sim.prefilling import PrefillNode
from bench.sim.request import Outcome, SimRequest
from bench.sim.reserving import Reserving
from bench.sim.shapes import NodeShape
from bench.sim.view import View
from coordinator.admission import Admission
from coordinator.calibration import PlacedForecast
from coordinator.cluster import LOOK_AGAIN_S
from coordinator.members import Member, Members
from coordinator.queue import Demand
from coordinator.slo import Targets
from kvrelay.cluster import CacheEvents, NodeStatus
from kvrelay.types import InstanceId, Role


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
        targets_of: Callable[[str], Targets],
        weight_of: Callable[[str], float],
        max_queue_wait_s: float,
        times_decisions: bool,
        ended: Callable[[SimRequest], None],
    ) -> None:
        self.prefill: dict[InstanceId, PrefillNode] = {}
        self.decode: dict[InstanceId, DecodeNode] = {}
        self.decisions_s: list[float] = []  # of the processor, to rank the nodes for one try
        self.num_reserves = 0  # calls
        self._clock = clock
        self._shape = shape
        self._members = members
        self._admission = admission
        self._placing = placing
        self._reserving = reserving
        self._view = View(clock, shape, members, reserving)
        self._door = Door(self._view, admission, placing, targets_of, weight_of)
        self._times_decisions = times_decisions  # asking for the time takes as long as a decision on some machines
        self._max_queue_wait_s = max_queue_wait_s
        self._ended = ended
        self._will_look_again = False

    def joined(self, member: Member) -> None:
        """Before its first status."""
        self._view.joined(member)

    def told(self, member: Member, events: CacheEvents) -> None:
        """A node told of blocks that came and went."""
        self._view.told(member, events)

    def seen(self, member: Member, status: NodeStatus) -> None:
        """A node's status came."""
        if self._members.update(member, status, self._clock.now):
            self._admission.changed()

    def ask(self, request: SimRequest) -> None:
        """A request is at the door."""
        now = self._clock.now
        demand = self._view.demand(request)
        outcome = self._door.why_not(request, demand, now)
        if outcome is not None:
            self._end(request, outcome)
            return
        request.entered_at = now
        request.num_charged = demand.num_tokens
        may_try = partial(self._clock.after, 0.0, self._try, request)
        request.ticket = self._admission.enter(may_try, demand, now)
        self._clock.after(self._max_queue_wait_s, self._give_up, request)

    def began(self, request: SimRequest) -> None:
        """A decode node has its first token."""
        if request.placed_forecast is not None:
            self._clock.after(self._shape.call_s, self._hear_of_first, request, request.placed_forecast)

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
        self._view.refused(self._view.by_id[request.prefill_node], request)
        self._send_to_another(request, busy | {request.prefill_node})

    # Its turn

    def _try(self, request: SimRequest) -> None:
        if request.ticket is None:
            return  # it gave up
        started = time.thread_time() if self._times_decisions else 0.0
        choice = self._placing.choose(request, self._view.known(request))
        order = choice.order()
        if self._times_decisions:
            self.decisions_s.append(time.thread_time() - started)
        self._reserve_on(request, choice, order, 0)

    def _reserve_on(self, request: SimRequest, choice: Choice, order: list[Member], place: int) -> None:
        if place == len(order):
            self._no_room(request)
        else:
            self._clock.after(self._shape.call_s, self._reserve, request, choice, order, place)

    def _reserve(self, request: SimRequest, choice: Choice, order: list[Member], place: int) -> None:
        """At the node."""
        self.num_reserves += 1
        node = self.decode[order[place].info.instance_id]
        num_cached = node.reserve(request, self._view.num_reserved(request))
        if num_cached is None:
            self._clock.after(self._shape.call_s, self._reserve_on, request, choice, order, place + 1)
        else:
            self._clock.after(self._shape.call_s, self._granted, request, choice, order[place], num_cached)

    def _granted(self, request: SimRequest, choice: Choice, decode: Member, num_cached_blocks: int) -> None:
        node = self.decode[decode.info.instance_id]
        request.num_cached_decode = num_cached_blocks * self._shape.block_tokens
        settled = choice.settle(decode, num_cached_blocks, self._clock.now)
        if request.ticket is None or settled is None:
            self._clock.after(self._shape.call_s, node.release, request)
            self._no_room(request)
            return
        request.decode_node, request.is_tail = decode.info.instance_id, settled.prefill is None
        request.placed_forecast = settled.placed_forecast
        num_uncached = max(1, request.arrival.num_prompt - request.num_cached_decode)
        self._view.assigned(decode, request, num_uncached if request.is_tail else 0)
        self._admission.admitted(request.ticket, self._clock.now)
        request.ticket = None
        request.granted_at = request.granted_at or self._clock.now
        if settled.prefill is None:
            self._clock.after(self._shape.call_s, node.compute, request)
        else:
            self._send_to(settled.prefill, request, frozenset())

    def _no_room(self, request: SimRequest) -> None:
        if request.ticket is not None:
            self._admission.refused(request.ticket, self._clock.now)
            self._look_again()

    def _look_again(self) -> None:
        if not self._will_look_again:
            self._will_look_again = True
            self._clock.after(LOOK_AGAIN_S, self._looks_again)

    def _looks_again(self) -> None:
        self._will_look_again = False
        self._admission.changed()

    # Computing

    def _send_to_another(self, request: SimRequest, busy: frozenset[InstanceId]) -> None:
        assert request.decode_node is not None
        decode = self._view.by_id[request.decode_node]
        candidates = self._placing.choose(request, self._view.known(request)).prefill_for(decode)
        member = next((member for member in candidates if member.info.instance_id not in busy), None)
        if member is None:
            self._queue_again(request)
        else:
            self._send_to(member, request, busy)

    def _send_to(self, member: Member, request: SimRequest, busy: frozenset[InstanceId]) -> None:
        request.prefill_node = member.info.instance_id
        num_blocks = self._view.cached(Role.PREFILL_NODE, request.prompt_hashes).get(member.info.instance_id, 0)
        num_uncached = request.arrival.num_prompt - num_blocks * self._shape.block_tokens
        self._view.assigned(member, request, max(1, num_uncached))
        self._clock.after(self._shape.call_s, self.prefill[member.info.instance_id].submit, request, busy)

    def _queue_again(self, request: SimRequest) -> None:
        """Every prefill node became busy in between: back to the front of the queue."""
        assert request.decode_node is not None
        self._clock.after(self._shape.call_s, self.decode[request.decode_node].release, request)
        request.decode_node = request.prefill_node = None
        request.ticket = self._admission.enter_in_front(
            partial(self._clock.after, 0.0, self._try, request),
            Demand(request.arrival.tenant, num_tokens=0),
            self._clock.now,
            refused=True,
        )
        self._look_again()

    # Its end

    def _hear_of_first(self, request: SimRequest, placed_forecast: PlacedForecast) -> None:
        self._placing.came(placed_forecast, self._clock.now)

    def _hear_of_end(self, request: SimRequest) -> None:
        self._reserving.finished(request.arrival)
        self._end(request, Outcome.FINISHED)
        self._door.note_answer(request.itl_s * (request.arrival.num_output - 1))
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
