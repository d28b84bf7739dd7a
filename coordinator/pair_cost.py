"""What each pair of a prefill and a decode node would cost, best first. Pure.

A pair costs seconds of waiting: the request's own until its first token and for the tokens after it, and those by which
it holds up the sequences that run on the decode node. So a cached prefix draws a request to its node until what waits
there takes longer than the prefix spares, and a decode node computes what it lacks of a prompt itself where that takes
less, running sequences counted, than to have it computed and handed over.

While no node has measured how fast it computes prompts, nodes are ranked as in `coordinator.router`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from coordinator.circuits import Party
from coordinator.forecast import Forecast, Work, forecast_handoff, forecast_tail, usual_token_s
from coordinator.foresight import Foresight, Way
from coordinator.members import Member
from coordinator.router import has_slot, rank_decode, rank_prefill
from coordinator.shortlist import NUM_BEST, best_decode, best_prefill
from coordinator.standing import Standing
from kvrelay.types import InstanceId

NUM_CLOSE = 2  # prefill nodes that are tried with a decode node: links make less of a difference than queues


@dataclass(slots=True)
class Pair:
    """`prefill` None: the decode node computes what it has not cached itself. `decode` None: one token is wanted."""

    prefill: Member | None
    decode: Member | None
    forecast: Forecast | None  # by rates alone; None while nothing is measured
    cost_s: float = 0.0  # 0 while nothing is measured

    def __str__(self) -> str:
        """For people."""
        names = " and ".join(member.info.address for member in (self.prefill, self.decode) if member is not None)
        if self.forecast is None:
            return f"{names}: not measured yet"
        return f"{names}: first token in {self.forecast.ttft_s:.3g} s, cost {self.cost_s:.3g} s"

    @property
    def way(self) -> Way:
        """To the first token."""
        if self.prefill is None:
            return Way.TAIL
        return Way.HANDOFF if self.decode is not None else Way.ALONE

    @property
    def may_begin(self) -> bool:
        """Whether, as far as is known, the prefill node would take it now."""
        return self.prefill is None or has_slot(self.prefill)


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
    """The best pair of each of the best decode nodes, the one to ask first in front; where one token is all that is
    wanted, the best prefill nodes. Empty where no node could ever hold it. As `PairCosts`."""
    return PairCosts(
        *(prefill, decode, work),
        suspects=suspects,
        avoid=avoid,
        num_blocks_now=num_blocks_now,
        local_tail_tokens=local_tail_tokens,
    ).ranked()


class PairCosts:
    """Of one answer, at one moment."""

    def __init__(
        self,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        work: Work,
        *,
        suspects: Collection[Party] = (),
        avoid: Collection[Party] = (),
        num_blocks_now: Callable[[Member], int] | None = None,
        local_tail_tokens: int = 0,
        foresight: Foresight | None = None,
    ) -> None:
        """`suspects`, which failed others lately, come late and `avoid`, which failed this very answer, last: nodes,
        and links between two. `num_blocks_now` says what a decode node sets aside at first, by its limits'
        `reserve_output_tokens`: all, where it is None.

        `local_tail_tokens` are those up to which a decode node computes itself while it has not measured how fast it
        does; 0: none ever does.
        """
        self.work = work
        self._suspects = suspects
        self._avoid = avoid
        self._num_blocks_now = num_blocks_now
        self._local_tail_tokens = local_tail_tokens
        self._foresight = foresight or Foresight()
        offered = [one for one in prefill if one.status.weight > 0]
        self._prefill = [one for one in offered if one.status.blocks.total >= work.num_prompt_blocks]
        self._decode = [one for one in decode if one.status.weight > 0 and one.status.blocks.total >= work.num_blocks]
        self._usual_s = usual_token_s(self._prefill or self._decode)
        # An answer may grow beyond the pools of prefill nodes, which held its prompt; resumed, it needs none of them.
        self.outgrown = bool(offered) and not self._prefill
        self.has_slot = any(has_slot(one) for one in self._prefill)
        self._best_prefill = self._rank_prefill(NUM_BEST)

    def ranked(self) -> list[Pair]:
        """As rank_pairs."""
        if self.work.num_left == 1 and not self.outgrown:
            return [self._alone(member) for member in self._best_prefill]
        pairs = [pair for member in self._rank_decode() if (pair := self.pair_with(member)) is not None]
        return sorted(pairs, key=self._key) if self._usual_s else pairs

    def prefill_for(self, decode: Member | None) -> list[Member]:
        """All that could ever hold the prompt, the best first, to hand over to `decode`, if that is wanted."""
        ranked = self._rank_prefill(len(self._prefill))
        pairs = [Pair(member, decode, None) for member in ranked]
        order = sorted(range(len(ranked)), key=lambda index: (*self._failed(pairs[index]), not pairs[index].may_begin))
        return [ranked[index] for index in order]

    def pair_with(self, decode: Member, num_cached_blocks: int | None = None) -> Pair | None:
        """The best one with this decode node, which is known to have so many leading blocks of the prompt. None where
        no prefill node is there and it is too much for the decode node by itself."""
        work = self.work
        if num_cached_blocks is not None:
            work = replace(work, cached_decode={**work.cached_decode, decode.info.instance_id: num_cached_blocks})
        if self.outgrown:
            return self._tail(decode, work)
        if not self._prefill:
            return self._tail(decode, work) if self._is_short(decode, work) else None
        if not self._may_compute(decode):
            return self._tail(decode, work) if self._is_short(decode, work) else self._handoff(decode, work)
        tail, handoff = self._tail(decode, work), self._handoff(decode, work)
        return tail if tail.cost_s <= handoff.cost_s else handoff

    # One pair

    def _is_short(self, decode: Member, work: Work) -> bool:
        return work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0)) <= self._local_tail_tokens

    def _may_compute(self, decode: Member) -> bool:
        """Whether it is known what the decode node would take for a prompt."""
        return bool(self._local_tail_tokens and self._usual_s and decode.standing.token_s)

    def _alone(self, prefill: Member) -> Pair:
        if not self._usual_s:
            return Pair(prefill, None, None)
        forecast = forecast_handoff(prefill, None, self.work, self._usual_s)
        ttft_s = self._foresight.correct_s(Way.ALONE, forecast.ttft_s)
        return Pair(prefill, None, forecast, ttft_s / prefill.status.weight)

    def _tail(self, decode: Member, work: Work) -> Pair:
        if not self._usual_s:
            return Pair(None, decode, None)
        forecast = forecast_tail(decode, work, self._usual_s)
        ttft_s = self._foresight.correct_s(Way.TAIL, forecast.ttft_s)
        cost_s = ttft_s + held_up_s(decode, work, self._usual_s) + answer_s(decode.standing, work)
        return Pair(None, decode, forecast, cost_s / decode.status.weight)

    def _handoff(self, decode: Member, work: Work) -> Pair:
        """By the prefill node that is best for it; one that failed, alone or by its link, only where every one did."""
        best = self._best_of(self._best_prefill[:NUM_CLOSE], decode, work)
        if any(self._failed(best)) and len(self._prefill) > NUM_CLOSE:
            best = self._best_of(self._prefill, decode, work)
        return best

    def _best_of(self, prefill: Sequence[Member], decode: Member, work: Work) -> Pair:
        """The first of equals."""
        pairs = (self._handoff_by(member, decode, work) for member in prefill)
        return min(pairs, key=lambda pair: (*self._failed(pair), not pair.may_begin, pair.cost_s))

    def _handoff_by(self, prefill: Member, decode: Member, work: Work) -> Pair:
        if not self._usual_s:
            return Pair(prefill, decode, None)
        forecast = forecast_handoff(prefill, decode, work, self._usual_s)
        ttft_s = self._foresight.correct_s(Way.HANDOFF, forecast.ttft_s)
        cost_s = ttft_s / prefill.status.weight + answer_s(decode.standing, work) / decode.status.weight
        return Pair(prefill, decode, forecast, cost_s)

    # Order

    def _rank_prefill(self, num_best: int) -> list[Member]:
        """Best first: all while nothing is measured, then so many."""
        work = self.work
        if self._usual_s:
            return best_prefill(self._prefill, work, self._usual_s, self._suspects, self._avoid, num_best)
        return rank_prefill(
            *(self._prefill, work.cached_prefill),
            num_blocks=work.num_prompt_blocks,
            suspects=_nodes(self._suspects),
            avoid=_nodes(self._avoid),
        )

    def _rank_decode(self) -> Sequence[Member]:
        """All while nothing is measured, best first; then those that may be the best."""
        work, suspects = self.work, {*self._suspects, *self._cut_off()}
        if self._usual_s:
            return best_decode(
                *(self._decode, work, self._best_prefill[0] if self._best_prefill else None, self._usual_s),
                *(self._num_blocks, suspects, self._avoid),
                may_compute=self.outgrown or self._local_tail_tokens > 0,
            )
        return rank_decode(
            *(self._decode, work.cached_decode),
            num_blocks=work.num_blocks,
            num_blocks_now=self._num_blocks,
            suspects=_nodes(suspects),
            avoid=_nodes(self._avoid),
        )

    def _key(self, pair: Pair) -> tuple[bool, bool, bool, bool, bool, float, int, int, InstanceId]:
        assert pair.decode is not None
        decode, instance_id = pair.decode, pair.decode.info.instance_id
        avoided, suspect = self._failed(pair)
        return (
            (instance_id,) in self._avoid,
            avoided,
            (instance_id,) in self._suspects,
            suspect,
            self._is_crowded(decode),
            pair.cost_s,
            decode.standing.num_requests,
            -decode.status.blocks.available,
            instance_id,
        )

    def _failed(self, pair: Pair) -> tuple[bool, bool]:
        """Whether the prefill node, or its link to the decode node, failed this answer, or others lately."""
        if pair.prefill is None or not (self._avoid or self._suspects):
            return False, False
        ids = tuple(member.info.instance_id for member in (pair.prefill, pair.decode) if member is not None)
        parties = (ids[:1], ids)
        return any(one in self._avoid for one in parties), any(one in self._suspects for one in parties)

    def _cut_off(self) -> set[Party]:
        """Decode nodes to which no prefill node has a link that works."""
        prefill_ids = [member.info.instance_id for member in self._prefill]
        return {
            (decode_id,)
            for decode_id in {party[1] for party in self._suspects if len(party) > 1}
            if all((one,) in self._suspects or (one, decode_id) in self._suspects for one in prefill_ids)
        }

    def _is_crowded(self, decode: Member) -> bool:
        num_cached = self.work.cached_decode.get(decode.info.instance_id, 0)
        return self._num_blocks(decode) - num_cached > decode.status.blocks.available

    def _num_blocks(self, decode: Member) -> int:
        """That it sets aside at first."""
        return self.work.num_blocks if self._num_blocks_now is None else self._num_blocks_now(decode)


def answer_s(decode: Standing, work: Work) -> float:
    """Seconds that the answer takes there, behind the prompts computed there, and that it holds up those beside it."""
    return work.num_counted * decode.answer_token_s + decode.waiting_s


def held_up_s(decode: Member, work: Work, usual_s: float) -> float:
    """Seconds that the prompt, computed there, holds up the sequences that run there, all together."""
    node = decode.standing
    num_uncached = work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0))
    return node.num_rows * num_uncached * (node.token_s or usual_s)


def _nodes(parties: Collection[Party]) -> set[InstanceId]:
    return {party[0] for party in parties if len(party) == 1}
