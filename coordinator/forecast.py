"""How soon a request would get its first token, and how fast the others, on a given pair of nodes. Pure.

Made from what nodes measured of themselves. What the kvstore holds of a prompt is not known to a coordinator, so
`load_s` is 0 and such tokens count as computed: a prompt that is found there comes sooner than is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from coordinator.members import Member
from coordinator.standing import Standing
from kvrelay.types import InstanceId

# A prefill node gives the oldest prompt a quarter of every step, the shortest ones the rest: see docs/scheduling.md.
OLDEST_SHARE = 0.25

# Of blocks that are evicted this part is computed once more, sooner or later: about as much as conversations find again
# of their prompts (docs/scheduling.md, "Policies compared"). A node with free blocks may be slower by that to go first,
# and one that has more than that of the prompt comes before both.
EVICTED_SHARE = 0.1

# Of an answer so many tokens are counted at most. max_tokens says little of how long it gets, and who runs beside it
# changes within as many steps.
COUNTED_TOKENS = 64

NUM_ASKED = 16  # nodes


@dataclass(frozen=True, slots=True)
class Forecast:
    """In seconds. The first four parts add up to `ttft_s`."""

    ttft_s: float  # from now until the first token
    itl_s: float  # between two tokens; 0 where it is not known, or there is one token only
    queue_s: float = 0.0  # behind what waits on the node; the wait in the coordinator comes before all this
    load_s: float = 0.0  # until what the kvstore has is there
    prefill_s: float = 0.0  # to compute what is not cached
    handoff_s: float = 0.0  # from the last computed token until the decode node has all blocks
    least_itl_s: float = 0.0  # however little runs beside it; 0 where that is not known, as the node has work


@dataclass(frozen=True, slots=True)
class Work:
    """What one answer still takes. The caches are leading blocks of the prompt, by node; who has none is left out."""

    num_tokens: int  # the prompt's, and the answer's so far
    num_positions: int  # of prompt and whole answer
    block_tokens: int
    block_bytes: int
    cached_prefill: Mapping[InstanceId, int]
    cached_decode: Mapping[InstanceId, int]

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still get."""
        return self.num_positions - self.num_tokens

    @property
    def num_counted(self) -> int:
        """Tokens of the answer that a cost takes into account; at least one."""
        return max(1, min(self.num_left, COUNTED_TOKENS))

    @property
    def num_prompt_blocks(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_positions // self.block_tokens)

    def num_uncached(self, num_cached_blocks: int) -> int:
        """Tokens to compute where so many leading blocks are cached: at least the last, for its logits."""
        reusable = min(num_cached_blocks, (self.num_tokens - 1) // self.block_tokens)
        return self.num_tokens - reusable * self.block_tokens


def usual_token_s(members: Iterable[Member]) -> float:
    """Mean over a few that measured how long a prompt token takes them, which is what is taken for one that has not,
    having just joined, say. 0 while none has."""
    return _mean_of_few(member.standing.token_s for member in members)


def usual_answer_token_s(decode: Iterable[Member]) -> float:
    """As usual_token_s, of what a token of an answer costs on a decode node."""
    return _mean_of_few(member.standing.answer_token_s for member in decode)


def _mean_of_few(seconds: Iterable[float]) -> float:
    measured = list(islice((one_s for one_s in seconds if one_s), NUM_ASKED))
    return sum(measured) / len(measured) if measured else 0.0


def tokens_before(prefill: Standing, num_tokens: int) -> float:
    """Prompt tokens that a prefill node computes before the last of `num_tokens` new ones, besides them.

    All that wait there; but where the others' prompts are longer on average and there is a place for one more, only
    what the oldest of them is sure of, and half of the step that runs.
    """
    waiting, num_prompts = prefill.waiting_tokens, prefill.num_requests
    if waiting <= num_tokens * num_prompts:
        return waiting
    is_short = num_tokens <= prefill.max_batched_tokens  # for which there are as many places again
    if num_prompts >= prefill.max_prefills * (1 + is_short):
        return waiting
    return min(waiting, num_tokens * OLDEST_SHARE / (1 - OLDEST_SHARE) + prefill.max_batched_tokens / 2)


def tokens_waited(prefill: Standing, num_tokens: int) -> float:
    """Prompt tokens for which somebody waits, the new prompt or another, when `num_tokens` come to a prefill node.

    It computes short prompts first, so of any two the longer waits while the shorter is computed, whichever is the new
    one: that is as much as it has itself for each that is there, but no more than they have.
    """
    each = min(prefill.waiting_tokens, num_tokens * prefill.num_requests)
    return max(each, tokens_before(prefill, num_tokens))


def tokens_lost(node: Standing, num_new_blocks: int, block_tokens: int) -> float:
    """Tokens that are computed once more, for somebody, because cached blocks give way to so many new ones."""
    num_evicted = min(max(0, num_new_blocks - node.num_free_blocks), node.num_cached_blocks)
    return EVICTED_SHARE * num_evicted * block_tokens


def forecast_handoff(prefill: Member, decode: Member | None, work: Work, usual_s: float) -> Forecast:
    """`prefill` computes, `decode` goes on; None: the first token is the only one. `usual_s` is what a token takes a
    node that has not measured it."""
    node = prefill.standing
    token_s = node.token_s or usual_s
    num_uncached = work.num_uncached(work.cached_prefill.get(prefill.info.instance_id, 0))
    queue_s = tokens_before(node, num_uncached) * token_s
    prefill_s = num_uncached * token_s
    if decode is None:
        return Forecast(queue_s + prefill_s, 0.0, queue_s, 0.0, prefill_s, 0.0)
    num_cached = work.cached_decode.get(decode.info.instance_id, 0)
    handoff_s = after_last_s(node, work, num_uncached, prefill_s, num_cached)
    return Forecast(
        ttft_s=queue_s + prefill_s + handoff_s,
        itl_s=itl_s(decode.standing, work),
        queue_s=queue_s,
        prefill_s=prefill_s,
        handoff_s=handoff_s,
        least_itl_s=least_itl_s(decode.standing),
    )


def forecast_tail(decode: Member, work: Work, usual_s: float) -> Forecast:
    """`decode` computes what it has not cached itself, in steps in which its running sequences advance too."""
    node = decode.standing
    token_s = node.token_s or usual_s
    num_uncached = work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0))
    num_steps = -(-num_uncached // node.prompt_budget)
    queue_s = node.waiting_tokens * token_s
    prefill_s = num_uncached * token_s + num_steps * node.step_s
    return Forecast(
        ttft_s=queue_s + prefill_s,
        itl_s=itl_s(node, work),
        queue_s=queue_s,
        prefill_s=prefill_s,
        least_itl_s=least_itl_s(node),
    )


def least_itl_s(decode: Standing) -> float:
    """Of an answer that runs alone. Told by a node that has nothing to do: what it measured with others beside it may
    say little of that."""
    return 0.0 if decode.num_requests or decode.waiting_tokens else decode.next_step_s


def itl_s(decode: Standing, work: Work) -> float:
    """Between two tokens, with one sequence more; what prompts computed there take of it is spread over the answer."""
    return decode.next_step_s + decode.waiting_s / work.num_counted


def after_last_s(prefill: Standing, work: Work, num_uncached: int, prefill_s: float, num_cached: int) -> float:
    """From the last computed token until a decode node that has `num_cached` blocks has all.

    Blocks leave as they are computed, so that is the last chunk's, or all that a slow link could not carry meanwhile. 0
    where the prefill node measured no link yet.
    """
    num_blocks = work.num_prompt_blocks - min(num_cached, work.num_prompt_blocks - 1)
    last_blocks = min(num_blocks, -(-min(num_uncached, prefill.chunk_tokens) // work.block_tokens))
    block_s = work.block_bytes * prefill.byte_s
    return max(last_blocks * block_s, num_blocks * block_s - prefill_s)
