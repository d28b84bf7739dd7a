"""Where a request may go, as the cluster stands."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.cluster import Cluster
from coordinator.members import Member
from coordinator.pair_cost import PairCosts
from coordinator.request import RequestState
from coordinator.work import Work
from kvrelay.types import Role


def costs_of(
    state: RequestState,
    cluster: Cluster,
    *,
    local_tail_tokens: int = 0,
    num_blocks_now: Callable[[Member], int] | None = None,
) -> PairCosts:
    """Of the pairs of nodes for the request as it stands; the arguments are PairCosts'."""
    layout, hashes = state.accepted.model.layout, state.hashes()
    chance = cluster.stored.chance(state.accepted.tenant)
    work = Work(
        num_tokens=state.num_tokens,
        num_positions=state.num_positions,
        block_tokens=layout.block_tokens,
        block_bytes=layout.slab_bytes,
        cached_prefill=cluster.cached(Role.PREFILL_NODE, hashes),
        cached_decode=cluster.cached(Role.DECODE_NODE, hashes),
        num_stored=cluster.stored.num_blocks(hashes) if chance else 0,
        stored_chance=chance,
    )
    return PairCosts(
        cluster.members.usable(Role.PREFILL_NODE),
        cluster.members.usable(Role.DECODE_NODE),
        work,
        suspects=cluster.suspects(),
        avoid=state.avoid,
        num_blocks_now=num_blocks_now,
        local_tail_tokens=local_tail_tokens,
        calibration=cluster.calibration,
    )


def prefill_candidates(state: RequestState, cluster: Cluster, decode: Member | None) -> list[Member]:
    """Prefill nodes for the request as it stands, the best first; `decode` is where the KV shall go."""
    return costs_of(state, cluster).prefill_for(decode)
