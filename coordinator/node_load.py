"""What a node's status comes to for whoever thinks of sending it a request: worked out once a status. Pure.

A placement looks at every node, so what it needs of each lies ready in plain numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.waiting_prompts import WaitingPrompts
from kvrelay.cluster import NodeRates, NodeStatus
from kvrelay.limits import DecodeLimits, PrefillLimits

LEAST_WEIGHT = 0.001  # stands for 0 where costs are divided by it
_NO_LIMIT = 2**31  # of a node that did not tell


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Of one node. Seconds are 0 where it measured nothing; counts include what was sent since its last status."""

    status: NodeStatus
    assigned: tuple[int, ...]  # of requests that this coordinator sent it since, each one's tokens to compute there
    step_tokens: int  # of prompts in a step, at most
    has_slot: bool  # it would take one more request now
    weight: float  # above 0: one that takes nothing new may have been told so while a request asked it for room
    token_s: float  # to compute one token of a prompt
    byte_s: float  # to hand over one byte
    store_byte_s: float  # to load one from the kvstore
    num_requests: int  # that run, wait or are on their way
    waiting_tokens: int  # of prompts, to be computed before a new one's, all told
    waiting_s: float  # that those take; 0 where it is not known what a token takes
    num_offered_blocks: int  # that a request could ever get; -1 where it takes nothing new
    num_free_blocks: int
    num_cached_blocks: int  # that nobody holds: they are evicted for new ones
    # Of prefill nodes
    prompts: WaitingPrompts
    chunk_tokens: int  # of one prompt in a step, at most
    max_prefills: int
    # Of decode nodes: a step of its sequences, as it is and with one more
    step_s: float
    next_step_s: float
    num_rows: int  # in a step
    answer_token_s: float  # what a token of an answer costs: one more sequence, and those beside it, held up
    reserve_output_tokens: int  # of DecodeLimits
    # Over its weight, as in costs
    weighted_token_s: float
    weighted_waiting_s: float
    weighted_answer_token_s: float
    weighted_tail_token_s: float  # to compute one token of a prompt, by which all sequences are held up


def load_of(status: NodeStatus, assigned: tuple[int, ...] = (), rates: NodeRates | None = None) -> NodeLoad:
    """Of a node that was sent requests with so many tokens to compute each since its last status. `rates` are what
    counts of what it measured; None: all as it says."""
    rates, limits = rates or status.rates, status.limits
    max_batch = limits.max_batch if isinstance(limits, DecodeLimits) else _NO_LIMIT
    num_requests = status.num_running + status.num_waiting + status.num_reservations + len(assigned)
    num_rows = min(num_requests, max_batch)
    step_s, row_s = _known(rates.step_s), _known(rates.step_row_s)
    next_step_s = step_s + row_s * min(num_requests + 1, max_batch)
    crowding = max(0, num_requests + 1 - max_batch) / max_batch  # batches that wait for a place in the batch
    token_s = _inverse(rates.prefill_tokens_per_s)
    waiting_tokens = status.num_waiting_tokens + sum(assigned)
    weight, answer_token_s = status.weight or LEAST_WEIGHT, next_step_s * (1 + crowding) + num_rows * row_s
    step_tokens = status.step_tokens or _most_in_step(limits, num_rows)
    chunk_tokens = limits.chunk_tokens if isinstance(limits, PrefillLimits) else _NO_LIMIT
    return NodeLoad(
        status=status,
        assigned=assigned,
        step_tokens=step_tokens,
        has_slot=status.num_slots_free > len(assigned),
        weight=weight,
        token_s=token_s,
        byte_s=_inverse(rates.handoff_bytes_per_s),
        store_byte_s=_inverse(rates.store_bytes_per_s),
        num_requests=num_requests,
        waiting_tokens=waiting_tokens,
        waiting_s=waiting_tokens * token_s,
        num_offered_blocks=status.blocks.total if status.weight > 0 else -1,
        num_free_blocks=status.blocks.free,
        num_cached_blocks=status.blocks.cached,
        prompts=WaitingPrompts((*_prompts_told(status), *filter(None, assigned))),
        chunk_tokens=min(chunk_tokens, step_tokens),
        max_prefills=limits.max_prefills if isinstance(limits, PrefillLimits) else _NO_LIMIT,
        step_s=step_s + row_s * num_rows if num_rows else 0.0,
        next_step_s=next_step_s,
        num_rows=num_rows,
        answer_token_s=answer_token_s,
        reserve_output_tokens=limits.reserve_output_tokens if isinstance(limits, DecodeLimits) else 0,
        weighted_token_s=token_s / weight,
        weighted_waiting_s=waiting_tokens * token_s / weight,
        weighted_answer_token_s=answer_token_s / weight,
        weighted_tail_token_s=token_s * (1 + num_rows) / weight,
    )


def _most_in_step(limits: DecodeLimits | PrefillLimits | None, num_rows: int) -> int:
    """Tokens of prompts, by the limits of a node that did not tell."""
    if limits is None:
        return _NO_LIMIT
    return max(1, limits.max_batched_tokens - num_rows * isinstance(limits, DecodeLimits))


def _prompts_told(status: NodeStatus) -> tuple[float, ...]:
    """Each prompt's tokens. Of those that a node did not tell one by one, all are taken for equally long."""
    num_tokens = status.num_waiting_tokens - sum(status.prompt_tokens)
    if num_tokens <= 0:
        return status.prompt_tokens
    num_prompts = max(1, status.num_running + status.num_waiting - len(status.prompt_tokens))
    return (*status.prompt_tokens, *(num_tokens / num_prompts,) * num_prompts)


def _known(seconds: float) -> float:
    return seconds if 0 < seconds < math.inf else 0.0


def _inverse(rate: float) -> float:
    return _known(1.0 / rate) if 0 < rate < math.inf else 0.0
