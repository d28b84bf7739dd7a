"""Where requests go: kvrelay's own ranking of nodes, and those it is compared with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.sim.request import SimRequest
from coordinator.members import Member
from coordinator.router import has_slot, rank_decode, rank_prefill
from kvrelay.types import InstanceId

Cached = Mapping[InstanceId, int]  # leading blocks that a node probably has


class Placing(Protocol):
    """Nodes that could ever hold the request, the one to ask first in front. `num_blocks` are of the whole request at
    its longest, `num_blocks_now` what is set aside at first."""

    def decode(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int, num_blocks_now: int
    ) -> list[Member]: ...

    def prefill(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int
    ) -> list[Member]: ...


class Routed:
    """coordinator.router: load in blocks of prompt, less what is cached."""

    name = "load less cached blocks"

    def decode(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int, num_blocks_now: int
    ) -> list[Member]:
        return rank_decode(members, cached, num_blocks=num_blocks, num_blocks_now=lambda member: num_blocks_now)

    def prefill(self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int) -> list[Member]:
        return rank_prefill(members, cached, num_blocks=num_blocks)


class LeastLoaded(Routed):
    """The same without an eye for caches."""

    name = "least loaded"

    def decode(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int, num_blocks_now: int
    ) -> list[Member]:
        return super().decode(request, members, {}, num_blocks, num_blocks_now)

    def prefill(self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int) -> list[Member]:
        return super().prefill(request, members, {}, num_blocks)


class RoundRobin:
    """The next one each time, whoever has room; those without come last."""

    name = "round robin"

    def __init__(self) -> None:
        self._num_decode = self._num_prefill = 0

    def decode(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int, num_blocks_now: int
    ) -> list[Member]:
        self._num_decode += 1
        order = _rotated(_fitting(members, num_blocks), self._num_decode)
        return sorted(order, key=lambda member: num_blocks_now > member.status.blocks.available)

    def prefill(self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int) -> list[Member]:
        self._num_prefill += request.decode_node is not None  # not when it only looks for a free place
        order = _rotated(_fitting(members, num_blocks), self._num_prefill)
        return sorted(order, key=lambda member: not has_slot(member))


class PrefixAffinity:
    """Whoever has most of the prompt, whatever it has to do; the least loaded where nobody has any."""

    name = "prefix affinity"

    def decode(
        self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int, num_blocks_now: int
    ) -> list[Member]:
        order = LeastLoaded().decode(request, members, {}, num_blocks, num_blocks_now)
        return sorted(order, key=lambda member: -cached.get(member.info.instance_id, 0))

    def prefill(self, request: SimRequest, members: Sequence[Member], cached: Cached, num_blocks: int) -> list[Member]:
        order = LeastLoaded().prefill(request, members, {}, num_blocks)
        return sorted(order, key=lambda member: -cached.get(member.info.instance_id, 0))


def _fitting(members: Sequence[Member], num_blocks: int) -> list[Member]:
    return [member for member in members if num_blocks <= member.status.blocks.total]


def _rotated(members: list[Member], by: int) -> list[Member]:
    start = by % len(members) if members else 0
    return members[start:] + members[:start]
