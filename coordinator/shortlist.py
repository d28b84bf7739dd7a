"""The few nodes of a role of which pairs are worth making, out of a thousand. Pure.

Every node is looked at, so this is written for speed. What it leaves out is how the two nodes of a pair bear on each
other, which `coordinator.pair_cost` puts in for the few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from coordinator.circuits import Party
from coordinator.forecast import after_last_s, forecast_handoff, late_s, others_wait_s, tokens_lost
from coordinator.members import Member
from coordinator.prompt_parts import PromptParts, parts_of
from coordinator.work import Work

T = TypeVar("T")

NUM_BEST = 8
TIMES_NEAR = 2  # as many prefill nodes are looked at closely

# Added to the cost of what shall come after all others. Of two kinds together the greater one decides.
BUSY_S = 1e6  # no slot, no room
SUSPECT_S = 1e8  # failed others lately
AVOIDED_S = 1e10  # failed this very answer


class _ByCached(dict[int, T]):
    """What comes of a number of blocks cached: of many nodes few numbers differ."""

    def __init__(self, work_out: Callable[[int], T]) -> None:
        self._work_out = work_out

    def __missing__(self, num_cached: int) -> T:
        self[num_cached] = known = self._work_out(num_cached)
        return known


def best_prefill(
    members: Sequence[Member],
    work: Work,
    usual_s: float,
    suspects: Collection[Party],
    avoid: Collection[Party],
    num_best: int = NUM_BEST,
) -> list[Member]:
    """By how long each takes for the prompt, its link longer than that for all of it if an answer follows, somebody
    waits there for that, and what is evicted for it took, the best first; `usual_s` is what a token takes a node that
    has not measured it. Of equals the least loaded."""
    near = _near_prefill(members, work, usual_s, suspects, avoid, TIMES_NEAR * num_best)
    costs_s = [_cost_s(member, work, usual_s) for member in near]
    return _least(near, costs_s, suspects, avoid, num_best)


def _near_prefill(
    members: Sequence[Member],
    work: Work,
    usual_s: float,
    suspects: Collection[Party],
    avoid: Collection[Party],
    num_near: int,
) -> list[Member]:
    """About the best: all that waits on a node counts as of equally long prompts, and loading takes no time."""
    uncached = _ByCached(lambda num_cached: work.num_uncached(num_cached) - work.num_stored_tokens(num_cached))
    num_bytes = work.num_prompt_blocks * work.block_bytes if work.num_left > 1 else 0
    cached, num_blocks, block_tokens = work.cached_prefill, work.num_prompt_blocks, work.block_tokens
    costs_s: list[float] = []
    for member in members:
        node, num_cached = member.load, cached.get(member.info.instance_id, 0)
        num_uncached = uncached[num_cached]
        num_tokens: float = node.waiting_tokens
        if num_tokens > num_uncached * node.num_requests:
            num_tokens = num_uncached * node.num_requests
        if num_blocks - num_cached > node.num_free_blocks:
            num_tokens += tokens_lost(node, num_blocks - num_cached, block_tokens)
        cost_s = (num_uncached + num_tokens) * (node.weighted_token_s or usual_s / node.weight)
        if num_bytes:
            late_s = num_bytes * node.byte_s - num_uncached * (node.token_s or usual_s)
            if late_s > 0:
                cost_s += late_s / node.weight
        costs_s.append(cost_s if node.has_slot else cost_s + BUSY_S)
    return _least(members, costs_s, suspects, avoid, num_near)


def _cost_s(prefill: Member, work: Work, usual_s: float) -> float:
    node, cost_s = prefill.load, _ready_s(prefill, work, usual_s)
    if work.num_left > 1:
        cost_s += late_s(node, work, _parts(prefill, work, usual_s), work.num_prompt_blocks)
    return cost_s / node.weight + BUSY_S * (not node.has_slot)


def _ready_s(prefill: Member, work: Work, usual_s: float) -> float:
    """Until the last token is computed, and what that costs others."""
    return forecast_handoff(prefill, None, work, usual_s).ttft_s + others_wait_s(prefill, work, usual_s)


def _parts(prefill: Member, work: Work, usual_s: float) -> PromptParts:
    node = prefill.load
    return parts_of(work, node, work.cached_prefill.get(prefill.info.instance_id, 0), node.token_s or usual_s)


def best_decode(
    members: Sequence[Member],
    work: Work,
    prefill: Member | None,
    usual_s: float,
    usual_answer_s: float,
    num_blocks_now: Callable[[Member], int],
    suspects: Collection[Party],
    avoid: Collection[Party],
    *,
    may_compute: bool,
) -> list[Member]:
    """By what each costs with the best prefill node, if there is one; or by itself, if it has measured what prompts
    take and they `may_compute`. The best first, of equals the least loaded.

    `usual_s` and `usual_answer_s` are what a token of a prompt, and of an answer, costs nodes that measured nothing.
    `num_blocks_now` looks at nothing of a node but its limits' `reserve_output_tokens`.
    """
    uncached = _ByCached(work.num_uncached)
    handed_over_s = _ByCached(partial(_handed_over_s, prefill, work, usual_s))
    cached, num_counted = work.cached_decode, work.num_counted
    num_blocks: dict[int, int] = {}  # to set aside now, by what nodes set aside of an answer
    costs_s: list[float] = []
    for member in members:
        node, num_cached = member.load, cached.get(member.info.instance_id, 0)
        cost_s = handed_over_s[num_cached]
        if may_compute and node.weighted_tail_token_s:
            tail_s = uncached[num_cached] * node.weighted_tail_token_s
            if tail_s < cost_s:
                num_steps = -(uncached[num_cached] // -node.step_tokens)
                tail_s += node.weighted_waiting_s + num_steps * node.step_s / node.weight
                cost_s = min(cost_s, tail_s)
        cost_s += node.weighted_waiting_s
        cost_s += num_counted * (node.weighted_answer_token_s or usual_answer_s / node.weight)
        num_needed = num_blocks.get(node.reserve_output_tokens)
        if num_needed is None:
            num_needed = num_blocks[node.reserve_output_tokens] = num_blocks_now(member)
        num_new = num_needed - num_cached
        if num_new > node.num_free_blocks:
            token_s = node.weighted_token_s or usual_s / node.weight
            cost_s += tokens_lost(node, num_new, work.block_tokens) * token_s
            if num_new > node.num_free_blocks + node.num_cached_blocks:
                cost_s += BUSY_S
        costs_s.append(cost_s)
    return _least(members, costs_s, suspects, avoid, NUM_BEST)


def _handed_over_s(prefill: Member | None, work: Work, usual_s: float, num_cached: int) -> float:
    """BUSY_S where there is no prefill node: less than any of a kind, the same for all."""
    if prefill is None:
        return BUSY_S
    node, parts = prefill.load, _parts(prefill, work, usual_s)
    return (_ready_s(prefill, work, usual_s) + after_last_s(node, work, parts, num_cached)) / node.weight


def _least(
    members: Sequence[Member],
    costs_s: Sequence[float],
    suspects: Collection[Party],
    avoid: Collection[Party],
    num_best: int,
) -> list[Member]:
    """Of the many only what they cost is compared: what tells equals apart is looked up of the few that are left."""
    if suspects or avoid:
        names = [(member.info.instance_id,) for member in members]
        costs_s = [
            cost_s + SUSPECT_S * (name in suspects) + AVOIDED_S * (name in avoid)
            for cost_s, name in zip(costs_s, names, strict=True)
        ]
    most_s = heapq.nsmallest(num_best, costs_s)[-1] if costs_s and num_best else 0.0
    few = [
        (cost_s, member.load.num_requests, member.info.instance_id, member)
        for cost_s, member in zip(costs_s, members, strict=True)
        if cost_s <= most_s
    ]
    return [member for *_, member in heapq.nsmallest(num_best, few)]
