"""What the coordinator knows of its nodes: their last statuses, and what they told of their caches."""

from __future__ import annotations

from bench.sim.clock import VirtualClock
from bench.sim.placing import Known
from bench.sim.request import SimRequest
from bench.sim.reserving import Reserving
from bench.sim.shapes import NodeShape
from coordinator.members import COMPUTING_ROLES, Member, Members
from coordinator.prefix_index import PrefixIndex
from coordinator.queue import Demand
from coordinator.router import has_slot
from kvrelay.cluster import CacheEvents
from kvrelay.types import BlockHash, InstanceId, Role


class View:
    """`by_id` are all members."""

    def __init__(self, clock: VirtualClock, shape: NodeShape, members: Members, reserving: Reserving) -> None:
        self.by_id: dict[InstanceId, Member] = {}
        self._clock = clock
        self._shape = shape
        self._members = members
        self._reserving = reserving
        self._caches = {role: PrefixIndex() for role in COMPUTING_ROLES}

    def joined(self, member: Member) -> None:
        self.by_id[member.info.instance_id] = member
        self._caches[member.info.role].joined(member.info.instance_id, self._clock.now)

    def told(self, member: Member, events: CacheEvents) -> None:
        """No such message is ever lost here."""
        is_missing = self._caches[member.info.role].apply(member.info.instance_id, events, self._clock.now)
        assert not is_missing, f"{member.info.address} lost count of its blocks"

    def assigned(self, member: Member, request: SimRequest, num_tokens: int) -> None:
        """A request goes there, which has so many tokens to compute."""
        member.assign(num_tokens)
        self._caches[member.info.role].assigned(member.info.instance_id, request.prompt_hashes, self._clock.now)

    def refused(self, member: Member, request: SimRequest) -> None:
        """It had no place for the request after all."""
        self._caches[member.info.role].refused(member.info.instance_id, request.prompt_hashes)

    def cached(self, role: Role, hashes: list[BlockHash]) -> dict[InstanceId, int]:
        return self._caches[role].match(hashes, self._clock.now)

    def known(self, request: SimRequest) -> Known:
        hashes = request.prompt_hashes
        return Known(
            shape=self._shape,
            prefill=self._members.usable(Role.PREFILL_NODE),
            decode=self._members.usable(Role.DECODE_NODE),
            cached_prefill=self.cached(Role.PREFILL_NODE, hashes),
            cached_decode=self.cached(Role.DECODE_NODE, hashes),
            num_positions=request.arrival.num_prompt + request.arrival.max_tokens,
            num_positions_now=self.num_reserved(request),
        )

    def num_reserved(self, request: SimRequest) -> int:
        """Positions that are set aside at first."""
        return request.arrival.num_prompt + self._reserving.num_output(request.arrival)

    def demand(self, request: SimRequest) -> Demand:
        """What it costs its tenant."""
        hashes = request.prompt_hashes
        found = (self.cached(role, hashes) for role in COMPUTING_ROLES)
        num_blocks = max((blocks for cached in found for blocks in cached.values()), default=0)
        num_uncached = request.arrival.num_prompt - num_blocks * self._shape.block_tokens
        return Demand(request.arrival.tenant, max(num_uncached, 1) + self._reserving.num_output(request.arrival))

    def num_tokens_free(self) -> int:
        """Room on decode nodes, if any prefill node would take a prompt."""
        if not any(map(has_slot, self._members.usable(Role.PREFILL_NODE))):
            return 0
        num_blocks = sum(member.status.blocks.available for member in self._members.usable(Role.DECODE_NODE))
        return num_blocks * self._shape.block_tokens
