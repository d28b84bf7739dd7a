"""How soon a request would get its first token, and how fast the others, on a given pair of nodes. Pure.

Made from what nodes measured of themselves and have to do, and from what is known of where the prompt is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.members import Member
from coordinator.node_load import NodeLoad
from coordinator.prompt_parts import PromptParts, parts_of
from coordinator.work import Work

# Of blocks that are evicted this part is computed once more, sooner or later: about as much as conversations find again
# of their prompts (docs/scheduling.md, "Policies compared"). A node with free blocks may be slower by that to go first,
# and one that has more than that of the prompt comes before both.
EVICTED_SHARE = 0.1

NUM_ASKED = 16  # nodes


@dataclass(frozen=True, slots=True)
class Forecast:
    """In seconds. The first four parts add up to `ttft_s`."""

    ttft_s: float  # from now until the first token
    itl_s: float  # between two tokens; 0 where it is not known, or there is one token only
    queue_s: float = 0.0  # behind what waits on the node; the wait in the coordinator comes before all this
    load_s: float = 0.0  # until what the kvstore has is there, beyond queue_s
    prefill_s: float = 0.0  # to compute what is nowhere cached
    handoff_s: float = 0.0  # from the last computed token until the decode node has all blocks
    least_itl_s: float = 0.0  # however little runs beside it; 0 where that is not known, as the node has work


def usual_token_s(members: Iterable[Member]) -> float:
    """Mean over a few that measured how long a prompt token takes them, which is what is taken for one that has not,
    having just joined, say. 0 while none has."""
    return _mean_of_few(member.load.token_s for member in members)


def usual_answer_token_s(decode: Iterable[Member]) -> float:
    """As usual_token_s, of what a token of an answer costs on a decode node."""
    return _mean_of_few(member.load.answer_token_s for member in decode)


def _mean_of_few(seconds: Iterable[float]) -> float:
    measured = list(islice((one_s for one_s in seconds if one_s), NUM_ASKED))
    return sum(measured) / len(measured) if measured else 0.0


def tokens_before(prefill: NodeLoad, num_tokens: float) -> float:
    """Prompt tokens that a prefill node computes before the last of `num_tokens` new ones, besides them."""
    return prefill.prompts.before(num_tokens, prefill.step_tokens, prefill.max_prefills)


def tokens_lost(node: NodeLoad, num_new_blocks: int, block_tokens: int) -> float:
    """Tokens that are computed once more, for somebody, because cached blocks give way to so many new ones."""
    num_evicted = min(max(0, num_new_blocks - node.num_free_blocks), node.num_cached_blocks)
    return EVICTED_SHARE * num_evicted * block_tokens


def forecast_handoff(prefill: Member, decode: Member | None, work: Work, usual_s: float) -> Forecast:
    """`prefill` computes, `decode` goes on; None: the first token is the only one. `usual_s` is what a token takes a
    node that has not measured it."""
    node = prefill.load
    parts = parts_of(work, node, work.cached_prefill.get(prefill.info.instance_id, 0), node.token_s or usual_s)
    queue_s = tokens_before(node, parts.num_computed) * parts.token_s
    load_s, prefill_s = parts.load_s(queue_s), parts.rest_s
    if decode is None:
        return Forecast(queue_s + load_s + prefill_s, 0.0, queue_s, load_s, prefill_s, 0.0)
    num_cached = work.cached_decode.get(decode.info.instance_id, 0)
    handoff_s = after_last_s(node, work, parts, num_cached)
    return Forecast(
        ttft_s=queue_s + load_s + prefill_s + handoff_s,
        itl_s=itl_s(decode.load, work),
        queue_s=queue_s,
        load_s=load_s,
        prefill_s=prefill_s,
        handoff_s=handoff_s,
        least_itl_s=least_itl_s(decode.load),
    )


def others_wait_s(prefill: Member, work: Work, usual_s: float) -> float:
    """That a prefill node takes for the prompt, beyond what `forecast_handoff` says: longer prompts wait there while
    it is computed, and what is evicted for it is computed once more."""
    node, num_cached = prefill.load, work.cached_prefill.get(prefill.info.instance_id, 0)
    parts = parts_of(work, node, num_cached, node.token_s or usual_s)
    num_tokens = prefill.load.prompts.each(parts.num_computed) - tokens_before(node, parts.num_computed)
    num_lost = tokens_lost(node, work.num_prompt_blocks - num_cached, work.block_tokens)
    return (max(0.0, num_tokens) + num_lost) * parts.token_s


def forecast_tail(decode: Member, work: Work, usual_s: float) -> Forecast:
    """`decode` computes what it has not cached itself, in steps in which its running sequences advance too."""
    node = decode.load
    token_s = node.token_s or usual_s
    num_uncached = work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0))
    queue_s = node.waiting_tokens * token_s + -(-node.waiting_tokens // node.step_tokens) * node.step_s
    prefill_s = num_uncached * token_s + -(-num_uncached // node.step_tokens) * node.step_s
    return Forecast(
        ttft_s=queue_s + prefill_s,
        itl_s=itl_s(node, work),
        queue_s=queue_s,
        prefill_s=prefill_s,
        least_itl_s=least_itl_s(node),
    )


def least_itl_s(decode: NodeLoad) -> float:
    """Of an answer that runs alone. Told by a node that has nothing to do: what it measured with others beside it may
    say little of that."""
    return 0.0 if decode.num_requests or decode.waiting_tokens else decode.next_step_s


def itl_s(decode: NodeLoad, work: Work) -> float:
    """Between two tokens, with one sequence more; what prompts computed there take of it is spread over the answer."""
    return decode.next_step_s + decode.waiting_s / work.num_counted


def after_last_s(prefill: NodeLoad, work: Work, parts: PromptParts, num_cached: int) -> float:
    """From the last computed token until a decode node that has `num_cached` blocks has all.

    Blocks leave as they are computed, so that is the last chunk's, or all that a slow link could not carry meanwhile. 0
    where the prefill node measured no link yet.
    """
    num_blocks = work.num_prompt_blocks - min(num_cached, work.num_prompt_blocks - 1)
    last_blocks = min(num_blocks, math.ceil(min(parts.num_rest, prefill.chunk_tokens) / work.block_tokens))
    return max(last_blocks * work.block_bytes * prefill.byte_s, late_s(prefill, work, parts, num_blocks))


def late_s(prefill: NodeLoad, work: Work, parts: PromptParts, num_blocks: int) -> float:
    """That a link takes for so many blocks beyond what the prompt is computed in."""
    return max(0.0, num_blocks * work.block_bytes * prefill.byte_s - parts.rest_s)
