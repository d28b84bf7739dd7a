"""Where requests go: kvrelay's own choice of nodes, and those it is compared with. Pure.

A `Placing` is a policy of one run; for each try it makes a `Choice` out of the nodes as they are known then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.sim.request import SimRequest
from bench.sim.shapes import NodeShape
from coordinator.calibration import PlacedForecast
from coordinator.forecast import Forecast
from coordinator.members import Member
from coordinator.router import has_slot, rank_decode, rank_prefill
from kvrelay.types import InstanceId

Cached = Mapping[InstanceId, int]  # leading blocks that a node probably has


@dataclass(frozen=True, slots=True)
class Known:
    """Of the cluster when a request is tried: usable members, where its prompt probably is, what it wants of a node."""

    shape: NodeShape
    prefill: Sequence[Member]
    decode: Sequence[Member]
    cached_prefill: Cached
    cached_decode: Cached
    num_positions: int  # of the request at its longest
    num_positions_now: int  # that are set aside at first

    @property
    def num_blocks(self) -> int:
        return self.shape.blocks_for(self.num_positions)

    @property
    def num_blocks_now(self) -> int:
        return self.shape.blocks_for(self.num_positions_now)


@dataclass(frozen=True, slots=True)
class Settled:
    """How the prompt will be computed. `prefill` None: by the decode node itself."""

    prefill: Member | None
    placed_forecast: PlacedForecast | None = None


class Choice(Protocol):
    """`has_place`: some prefill node would take the prompt now, as far as is known."""

    @property
    def has_place(self) -> bool: ...

    def order(self) -> list[Member]:
        """Decode nodes to ask for room, the first one first."""
        ...

    def settle(self, decode: Member, num_cached_blocks: int, now: float) -> Settled | None:
        """With a decode node that granted room and has so much of the prompt; None: not at all now."""
        ...

    def prefill_for(self, decode: Member) -> list[Member]:
        """Prefill nodes to ask, the first one first."""
        ...


class Placing(Protocol):
    def choose(self, request: SimRequest, known: Known) -> Choice: ...

    def forecast(self, request: SimRequest, known: Known) -> Forecast | None:
        """What it would get if it were placed now, of a policy that can tell."""
        ...

    def came(self, placed_forecast: PlacedForecast, now: float) -> None:
        """The first token, of which something was forecast."""
        ...


Rank = Callable[[SimRequest, Known], list[Member]]


class _RankedChoice:
    """Two rankings that know nothing of each other, and a number of tokens up to which decode nodes compute prompts."""

    def __init__(self, request: SimRequest, known: Known, decode: Rank, prefill: Rank, local_tail_tokens: int) -> None:
        self._request = request
        self._known = known
        self._rank_decode = decode
        self._rank_prefill = prefill
        self._local_tail_tokens = local_tail_tokens
        self.has_place = any(map(has_slot, known.prefill))

    def order(self) -> list[Member]:
        most_cached = max(self._known.cached_decode.values(), default=0)
        if not self.has_place and not self._is_tail(most_cached):
            return []
        return self._rank_decode(self._request, self._known)

    def settle(self, decode: Member, num_cached_blocks: int, now: float) -> Settled | None:
        if self._is_tail(num_cached_blocks):
            return Settled(None)
        return Settled(self.prefill_for(decode)[0]) if self.has_place else None

    def prefill_for(self, decode: Member) -> list[Member]:
        return self._rank_prefill(self._request, self._known)

    def _is_tail(self, num_cached_blocks: int) -> bool:
        num_cached = num_cached_blocks * self._known.shape.block_tokens
        return self._request.arrival.num_prompt - num_cached <= self._local_tail_tokens


class Routed:
    """coordinator.router, by requests on a node less blocks cached there: what is done while nothing is measured."""

    name = "requests less cached blocks"

    def __init__(self, local_tail_tokens: int = 32) -> None:
        self._local_tail_tokens = local_tail_tokens

    def choose(self, request: SimRequest, known: Known) -> Choice:
        return _RankedChoice(request, known, self.decode, self.prefill, self._local_tail_tokens)

    def forecast(self, request: SimRequest, known: Known) -> Forecast | None:
        return None

    def came(self, placed_forecast: PlacedForecast, now: float) -> None: ...

    def decode(self, request: SimRequest, known: Known) -> list[Member]:
        return _by_load(known, known.cached_decode)

    def prefill(self, request: SimRequest, known: Known) -> list[Member]:
        return _prefill_by_load(request, known, known.cached_prefill)


class LeastLoaded(Routed):
    """The same without an eye for caches."""

    name = "least loaded"

    def decode(self, request: SimRequest, known: Known) -> list[Member]:
        return _by_load(known, {})

    def prefill(self, request: SimRequest, known: Known) -> list[Member]:
        return _prefill_by_load(request, known, {})


class RoundRobin(Routed):
    """The next one each time; those without room come last."""

    name = "round robin"

    def __init__(self, local_tail_tokens: int = 32) -> None:
        super().__init__(local_tail_tokens)
        self._num_decode = self._num_prefill = 0

    def decode(self, request: SimRequest, known: Known) -> list[Member]:
        self._num_decode += 1
        order = _rotated(_by_name(known.decode), self._num_decode)
        return sorted(order, key=lambda member: known.num_blocks_now > member.status.blocks.available)

    def prefill(self, request: SimRequest, known: Known) -> list[Member]:
        self._num_prefill += 1
        return sorted(_rotated(_by_name(known.prefill), self._num_prefill), key=lambda member: not has_slot(member))


class PrefixAffinity(LeastLoaded):
    """Whoever has most of the prompt, whatever it has to do; the least loaded where nobody has any."""

    name = "prefix affinity"

    def decode(self, request: SimRequest, known: Known) -> list[Member]:
        return _most_cached(super().decode(request, known), known.cached_decode)

    def prefill(self, request: SimRequest, known: Known) -> list[Member]:
        return _most_cached(super().prefill(request, known), known.cached_prefill)


def _by_load(known: Known, cached: Cached) -> list[Member]:
    num_blocks_now = known.num_blocks_now
    return rank_decode(known.decode, cached, num_blocks=known.num_blocks, num_blocks_now=lambda member: num_blocks_now)


def _prefill_by_load(request: SimRequest, known: Known, cached: Cached) -> list[Member]:
    return rank_prefill(known.prefill, cached, num_blocks=known.shape.blocks_for(request.arrival.num_prompt))


def _most_cached(members: list[Member], cached: Cached) -> list[Member]:
    return sorted(members, key=lambda member: -cached.get(member.info.instance_id, 0))


def _by_name(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.info.instance_id)


def _rotated(members: list[Member], by: int) -> list[Member]:
    start = by % len(members) if members else 0
    return members[start:] + members[:start]
