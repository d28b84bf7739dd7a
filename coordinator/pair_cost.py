"""What each pair of a prefill and a decode node would cost a request and those that run there, best first. Pure.

A pair costs the seconds until the request's first token, and what its answer and its prompt take from whom: its own
wait between tokens, and the time by which it holds up the sequences that run on the decode node. So a cached prefix
draws a request to its node until what waits there takes longer than the prefix spares; and a decode node computes what
it lacks of a prompt itself where that takes less, running sequences counted, than to have it computed and handed over.

While no prefill node has measured how fast it computes, nodes are ranked as in `coordinator.router`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from coordinator.circuits import Party
from coordinator.forecast import Forecast, Work, forecast_handoff, forecast_tail, usual_token_s
from coordinator.members import Member
from coordinator.router import rank_decode, rank_prefill
from kvrelay.types import InstanceId

ANSWER_TOKENS = 128  # of an answer are counted at most: most end long before max_tokens


@dataclass(slots=True)
class Pair:
    """`prefill` None: the decode node computes what it has not cached itself. `decode` None: one token is wanted."""

    prefill: Member | None
    decode: Member | None
    forecast: Forecast | None  # None while nothing is measured
    cost_s: float = 0.0  # 0 while nothing is measured


def rank_pairs(
    prefill: Sequence[Member],
    decode: Sequence[Member],
    work: Work,
    *,
    suspects: Collection[Party] = (),
    avoid: Collection[Party] = (),
    num_blocks_now: Callable[[Member], int] | None = None,
    local_tail_tokens: int = 0,
) -> list[Pair]:
    """One pair for each decode node that could ever hold the answer, the one to ask first in front; where one token is
    all that is wanted, one for each prefill node.

    `suspects` and `avoid` are nodes and links between two; `num_blocks_now` says what a decode node sets aside at
    first. `local_tail_tokens` are those up to which decode nodes compute while nothing is measured.
    """
    prefill_ids = _alone(suspects), _alone(avoid)
    ranked = rank_prefill(
        prefill, work.cached_prefill, num_blocks=work.num_prompt_blocks, suspects=prefill_ids[0], avoid=prefill_ids[1]
    )
    usual_s = usual_token_s(ranked)
    if work.num_left == 1:
        return [Pair(one, None, forecast_handoff(one, None, work, usual_s) if usual_s else None) for one in ranked]
    pairs = []
    for member in rank_decode(
        decode,
        work.cached_decode,
        num_blocks=work.num_blocks,
        num_blocks_now=num_blocks_now,
        suspects=prefill_ids[0],
        avoid=prefill_ids[1],
    ):
        num_uncached = work.num_uncached(work.cached_decode.get(member.info.instance_id, 0))
        if not ranked or num_uncached <= local_tail_tokens:
            pairs.append(Pair(None, member, forecast_tail(member, work, usual_s) if usual_s else None))
        else:
            best = ranked[0]
            pairs.append(Pair(best, member, forecast_handoff(best, member, work, usual_s) if usual_s else None))
    return pairs


def _alone(parties: Collection[Party]) -> set[InstanceId]:
    return {party[0] for party in parties if len(party) == 1}
