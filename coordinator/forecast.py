"""How soon a request would get its first token, and how fast the others, on a given pair of nodes. Pure.

Made from what nodes measured of themselves. What the kvstore holds of a prompt is not known to a coordinator, so
`load_s` is 0 and such tokens count as computed: a prompt that is found there comes sooner than is said here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.members import Member
from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.types import InstanceId

# A prefill node gives the oldest prompt a quarter of every step, the shortest ones the rest: see docs/scheduling.md.
OLDEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Forecast:
    """In seconds. The first four parts add up to `ttft_s`."""

    ttft_s: float  # from now until the first token
    itl_s: float  # between two tokens; 0 where it is not known, or there is one token only
    queue_s: float = 0.0  # behind what waits in the coordinator and on the node
    load_s: float = 0.0  # until what the kvstore has is there
    prefill_s: float = 0.0  # to compute what is not cached
    handoff_s: float = 0.0  # from the last computed token until the decode node has all blocks


@dataclass(frozen=True, slots=True)
class Work:
    """What one answer still takes. The caches are leading blocks of the prompt, by node; who has none is left out."""

    num_tokens: int  # the prompt's, and the answer's so far
    num_positions: int  # of prompt and whole answer
    block_tokens: int
    block_bytes: int
    cached_prefill: Mapping[InstanceId, int]
    cached_decode: Mapping[InstanceId, int]
    num_tokens_ahead: int = 0  # uncached prompt tokens of what waits in the coordinator before it

    @property
    def num_left(self) -> int:
        """Tokens that the answer may still get."""
        return self.num_positions - self.num_tokens

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


def positive(rate: float) -> float:
    """The rate if it is one; 0 for what is not measured, or no number."""
    return rate if math.isfinite(rate) and rate > 0 else 0.0


def token_s(member: Member) -> float | None:
    """Seconds a prompt token takes the node; None where it measured nothing yet."""
    rate = positive(member.status.rates.prefill_tokens_per_s)
    return 1.0 / rate if rate else None


def usual_token_s(members: Iterable[Member]) -> float | None:
    """Mean over those that measured; what is taken for a node that has not, having just joined, say."""
    measured = [seconds for member in members if (seconds := token_s(member)) is not None]
    return sum(measured) / len(measured) if measured else None


def step_s(decode: Member, num_rows: int) -> float:
    """A decode step with so many sequences; 0 where none was measured."""
    rates = decode.status.rates
    return positive(rates.step_s) + positive(rates.step_row_s) * num_rows


def num_rows(decode: Member) -> int:
    """Sequences that run on a decode node or are about to."""
    status = decode.status
    return status.num_running + status.num_waiting + status.num_reservations + decode.num_assigned


def tokens_before(prefill: Member, num_tokens: int) -> float:
    """Prompt tokens that a prefill node computes before the last of `num_tokens` new ones, besides them.

    All that wait there; but where the others' prompts are longer on average, only what the oldest of them is sure of,
    and half of the step that runs.
    """
    status = prefill.status
    waiting = status.num_waiting_tokens + prefill.num_assigned_tokens
    num_prompts = status.num_running + status.num_waiting + prefill.num_assigned
    limits = status.limits
    if not isinstance(limits, PrefillLimits) or waiting <= num_tokens * num_prompts:
        return waiting
    has_place = num_prompts < limits.max_prefills or num_tokens <= limits.max_batched_tokens
    if not has_place:
        return waiting
    return min(waiting, num_tokens * OLDEST_SHARE / (1 - OLDEST_SHARE) + limits.max_batched_tokens / 2)


def handoff_s(prefill: Member, num_bytes: int, last_chunk_bytes: int, prefill_s: float) -> float:
    """From the last computed token until all is at the decode node: blocks leave as they are computed, so that is the
    last chunk's, or all that a slow link could not carry meanwhile. 0 where the node measured no link yet."""
    rate = positive(prefill.status.rates.handoff_bytes_per_s)
    return max(last_chunk_bytes / rate, num_bytes / rate - prefill_s) if rate else 0.0


def forecast_handoff(prefill: Member, decode: Member | None, work: Work, usual_s: float) -> Forecast:
    """`prefill` computes, `decode` goes on; None: the first token is the only one. `usual_s` is what a token takes a
    node that has not measured it."""
    own_s = token_s(prefill) or usual_s
    num_uncached = work.num_uncached(work.cached_prefill.get(prefill.info.instance_id, 0))
    queue_s = (work.num_tokens_ahead + tokens_before(prefill, num_uncached)) * own_s
    prefill_s = num_uncached * own_s
    moved_s = itl_s = 0.0
    if decode is not None:
        cached = min(work.cached_decode.get(decode.info.instance_id, 0), work.num_prompt_blocks - 1)
        num_blocks = work.num_prompt_blocks - cached
        limits = prefill.status.limits
        chunk = min(num_uncached, limits.chunk_tokens) if isinstance(limits, PrefillLimits) else num_uncached
        last_blocks = min(num_blocks, -(-chunk // work.block_tokens))
        moved_s = handoff_s(prefill, num_blocks * work.block_bytes, last_blocks * work.block_bytes, prefill_s)
        itl_s = step_s(decode, num_rows(decode) + 1)
    return Forecast(queue_s + prefill_s + moved_s, itl_s, queue_s, 0.0, prefill_s, moved_s)


def forecast_tail(decode: Member, work: Work, usual_s: float) -> Forecast:
    """`decode` computes what it has not cached itself, in steps in which its running sequences advance too."""
    own_s = token_s(decode) or usual_s
    num_uncached = work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0))
    waiting = decode.status.num_waiting_tokens + decode.num_assigned_tokens
    queue_s = waiting * own_s
    prefill_s = num_uncached * own_s + num_steps(decode, num_uncached) * step_s(decode, num_rows(decode))
    return Forecast(queue_s + prefill_s, step_s(decode, num_rows(decode) + 1), queue_s, 0.0, prefill_s, 0.0)


def num_steps(decode: Member, num_tokens: int) -> int:
    """That a decode node needs for so many tokens of a prompt, each step within its budget."""
    limits = decode.status.limits
    if not isinstance(limits, DecodeLimits):
        return 1
    return -(-num_tokens // max(1, limits.max_batched_tokens - min(num_rows(decode), limits.max_batch - 1)))
