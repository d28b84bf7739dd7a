"""The few nodes of a role of which pairs are worth making, out of a thousand. Pure.

Every node is looked at, so this is written for speed. What it leaves out is how the two nodes of a pair bear on each
other, which `coordinator.pair_cost` puts in for the few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

from coordinator.circuits import Party
from coordinator.forecast import Work, after_last_s, tokens_lost, tokens_waited
from coordinator.members import Member

NUM_BEST = 8

# Added to the cost of what shall come after all others. Of two kinds together the greater one decides.
BUSY_S = 1e6  # no slot, no room
SUSPECT_S = 1e8  # failed others lately
AVOIDED_S = 1e10  # failed this very answer


class _Uncached(dict[int, int]):
    """Tokens to compute by blocks cached: of many nodes few numbers differ."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __missing__(self, num_cached: int) -> int:
        self[num_cached] = num_uncached = self._work.num_uncached(num_cached)
        return num_uncached


def best_prefill(
    members: Sequence[Member],
    work: Work,
    usual_s: float,
    suspects: Collection[Party],
    avoid: Collection[Party],
    num_best: int = NUM_BEST,
) -> list[Member]:
    """By how long each takes for the prompt, somebody waits there for that, and what is evicted for it took, the best
    first; `usual_s` is what a token takes a node that has not measured it. Of equals the least loaded."""
    uncached = _Uncached(work)
    cached, num_blocks, block_tokens = work.cached_prefill, work.num_prompt_blocks, work.block_tokens
    costs_s: list[float] = []
    for member in members:
        node, num_cached = member.standing, cached.get(member.info.instance_id, 0)
        num_uncached = uncached[num_cached]
        waited: float = node.waiting_tokens
        if waited > num_uncached * node.num_requests:
            waited = tokens_waited(node, num_uncached)
        if num_blocks - num_cached > node.num_free_blocks:
            waited += tokens_lost(node, num_blocks - num_cached, block_tokens)
        cost_s = (num_uncached + waited) * (node.token_s or usual_s) / node.weight
        if not node.has_slot:
            cost_s += BUSY_S
        costs_s.append(cost_s)
    return _least(members, costs_s, suspects, avoid, num_best)


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
    uncached = _Uncached(work)
    cached, num_counted = work.cached_decode, work.num_counted
    num_blocks: dict[int, int] = {}  # to set aside now, by what nodes set aside of an answer
    handed_over: dict[int, float] = {}  # what that costs, by blocks cached
    costs_s: list[float] = []
    for member in members:
        node = member.standing
        num_cached = cached.get(member.info.instance_id, 0)
        if num_cached not in handed_over:
            handed_over[num_cached] = _handed_over_s(prefill, work, usual_s, num_cached)
        own_s = (node.answer_token_s or usual_answer_s) * num_counted + node.waiting_s
        cost_s = own_s / node.weight + handed_over[num_cached]
        if may_compute and node.token_s:
            num_uncached = uncached[num_cached]
            tail_s = num_uncached * node.token_s * (1 + node.num_rows) + node.waiting_s
            tail_s -= num_uncached // -node.prompt_budget * node.step_s
            alone_s = (own_s + tail_s) / node.weight
            if alone_s < cost_s:
                cost_s = alone_s
        num_needed = num_blocks.get(node.reserve_output_tokens)
        if num_needed is None:
            num_needed = num_blocks[node.reserve_output_tokens] = num_blocks_now(member)
        num_new = num_needed - num_cached
        if num_new > node.num_free_blocks:
            token_s = node.token_s or usual_s
            cost_s += tokens_lost(node, num_new, work.block_tokens) * token_s / node.weight
            if num_new > node.num_free_blocks + node.num_cached_blocks:
                cost_s += BUSY_S
        costs_s.append(cost_s)
    return _least(members, costs_s, suspects, avoid, NUM_BEST)


def _handed_over_s(prefill: Member | None, work: Work, usual_s: float, num_cached: int) -> float:
    """BUSY_S where there is no prefill node: less than any of a kind, the same for all."""
    if prefill is None:
        return BUSY_S
    node = prefill.standing
    token_s = node.token_s or usual_s
    num_uncached = work.num_uncached(work.cached_prefill.get(prefill.info.instance_id, 0))
    ready_s = (num_uncached + tokens_waited(node, num_uncached)) * token_s
    return (ready_s + after_last_s(node, work, num_uncached, num_uncached * token_s, num_cached)) / node.weight


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
        (cost_s, member.standing.num_requests, member.info.instance_id, member)
        for cost_s, member in zip(costs_s, members, strict=True)
        if cost_s <= most_s
    ]
    return [member for *_, member in heapq.nsmallest(num_best, few)]
