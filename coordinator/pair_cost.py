"""The pairs of a prefill and a decode node that a request may go to, by what each costs, best first. Pure.

A cached prefix draws a request to its node until what waits there takes longer than the prefix spares. A decode node
computes what it lacks of a prompt itself where that takes less, running sequences counted, than to have it computed
elsewhere and handed over.

While no node has measured how fast it computes prompts, nodes are ranked as in `coordinator.router`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from coordinator.calibration import Calibration
from coordinator.circuits import Party
from coordinator.forecast import least_itl_s
from coordinator.members import Member
from coordinator.pair import Pair, Prices
from coordinator.prompt_parts import parts_of
from coordinator.router import has_slot, rank_decode, rank_prefill
from coordinator.shortlist import NUM_BEST, best_decode, best_prefill
from coordinator.work import Work
from kvrelay.types import InstanceId

NUM_CLOSE = 3  # prefill nodes that are tried with a decode node: what it has cached seldom makes another the best


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
        calibration: Calibration | None = None,
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
        self._prefill = _offered(prefill, work.num_prompt_blocks)
        self._decode = _offered(decode, work.num_blocks)
        self._prices = Prices(work, self._prefill, self._decode, calibration or Calibration(), self._num_blocks)
        # An answer may grow beyond the pools of prefill nodes, which held its prompt; resumed, it needs none of them.
        self.outgrown = not self._prefill and bool(_offered(prefill, 0))
        self._best_prefill = self._rank_prefill(NUM_BEST)

    @property
    def has_slot(self) -> bool:
        """Whether some prefill node would take the prompt now: others may take the last place any time."""
        return any(has_slot(one) for one in self._prefill)

    def ranked(self) -> list[Pair]:
        """The best pair of each of the best decode nodes, the one to ask first in front; where one token is all that is
        wanted, the best prefill nodes. Empty where no node could ever hold it."""
        if self.work.num_left == 1 and not self.outgrown:
            return [self._prices.alone(member) for member in self._best_prefill]
        pairs = [pair for member in self._rank_decode() if (pair := self.pair_with(member)) is not None]
        return sorted(pairs, key=self._key) if self._prices.known else pairs

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
            # Others were sent to prefill nodes while the decode node was asked: those that tried at one moment would
            # all go to the same one. None is left where all of them have weight 0 by now.
            self._best_prefill = self._rank_prefill(NUM_BEST) or self._best_prefill
        if self.outgrown:
            return self._prices.tail(decode, work)
        if not self._prefill:
            return self._prices.tail(decode, work) if self._is_short(decode, work) else None
        if not self._may_compute(decode):
            return self._prices.tail(decode, work) if self._is_short(decode, work) else self._handoff(decode, work)
        tail, handoff = self._prices.tail(decode, work), self._handoff(decode, work)
        return tail if tail.cost_s <= handoff.cost_s else handoff

    def least_ttft_s(self) -> float:
        """Until the first token on the quickest node, by rates alone and however short the queues become; 0 where one
        has measured nothing. The pair that costs least now may be none of the quickest."""
        work, prefill_s = self.work, []
        for member in self._prefill:
            node, num_cached = member.load, work.cached_prefill.get(member.info.instance_id, 0)
            parts = parts_of(work, node, num_cached, node.token_s)
            prefill_s.append(parts.load_s(queue_s=0.0) + parts.rest_s)
        for member in filter(self._may_compute, self._decode):
            num_uncached = work.num_uncached(work.cached_decode.get(member.info.instance_id, 0))
            prefill_s.append(num_uncached * member.load.token_s)
        return min(prefill_s, default=0.0)

    def least_itl_s(self) -> float:
        """Between two tokens on the quickest decode node with nothing beside the answer; 0 while one has work, which
        does not tell."""
        return min((least_itl_s(member.load) for member in self._decode), default=0.0)

    # One pair

    def _is_short(self, decode: Member, work: Work) -> bool:
        return work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0)) <= self._local_tail_tokens

    def _may_compute(self, decode: Member) -> bool:
        """Whether it is known what the decode node would take for a prompt."""
        return bool(self._local_tail_tokens and self._prices.known and decode.load.token_s)

    def _handoff(self, decode: Member, work: Work) -> Pair:
        """By the prefill node that is best for it; one that failed, alone or by its link, only where every one did."""
        best = self._best_of(self._best_prefill[:NUM_CLOSE], decode, work)
        if any(self._failed(best)) and len(self._prefill) > NUM_CLOSE:
            best = self._best_of(self._rank_prefill(len(self._prefill)), decode, work)
        return best

    def _best_of(self, prefill: Sequence[Member], decode: Member, work: Work) -> Pair:
        """The first of equals."""
        pairs = (self._prices.handoff(member, decode, work) for member in prefill)
        return min(pairs, key=lambda pair: (*self._failed(pair), not pair.may_begin, pair.cost_s))

    # Order

    def _rank_prefill(self, num_best: int) -> list[Member]:
        """Best first: all while nothing is measured, then so many."""
        work = self.work
        if self._prices.known:
            return best_prefill(self._prefill, work, self._prices.token_s, self._suspects, self._avoid, num_best)
        return rank_prefill(
            *(self._prefill, work.cached_prefill),
            num_blocks=work.num_prompt_blocks,
            suspects=_nodes(self._suspects),
            avoid=_nodes(self._avoid),
        )

    def _rank_decode(self) -> Sequence[Member]:
        """All while nothing is measured, best first; then those that may be the best."""
        work, suspects = self.work, {*self._suspects, *self._cut_off()}
        if self._prices.known:
            return best_decode(
                *(self._decode, work, self._best_prefill[0] if self._best_prefill else None, self._prices.token_s),
                *(self._prices.answer_token_s, self._num_blocks, suspects, self._avoid),
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
            decode.load.num_requests,
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
        if not any(len(party) > 1 for party in self._suspects):
            return set()
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


def _nodes(parties: Collection[Party]) -> set[InstanceId]:
    return {party[0] for party in parties if len(party) == 1}


def _offered(members: Iterable[Member], num_blocks: int) -> list[Member]:
    """Those that take new work and whose pools could hold so much."""
    return [one for one in members if one.load.num_offered_blocks >= num_blocks]
