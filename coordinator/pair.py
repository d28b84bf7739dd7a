"""What a pair of a prefill and a decode node costs a request and those that run there. Pure.

It costs seconds of waiting: the request's own until its first token and for the tokens after it, and those by which it
holds up longer prompts on the prefill node and the sequences that run on the decode node, and that it takes to compute
again what is evicted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.calibration import Calibration, Way
from coordinator.forecast import (
    Forecast,
    forecast_handoff,
    forecast_tail,
    others_wait_s,
    tokens_lost,
    usual_answer_token_s,
    usual_token_s,
)
from coordinator.members import Member
from coordinator.router import has_slot
from coordinator.work import Work


@dataclass(slots=True)
class Pair:
    """`prefill` None: the decode node computes what it has not cached itself. `decode` None: one token is wanted."""

    prefill: Member | None
    decode: Member | None
    forecast: Forecast | None  # by rates alone; None while nothing is measured
    cost_s: float = 0.0  # 0 while nothing is measured

    def __str__(self) -> str:
        """For people."""
        computes = self.prefill.info.address if self.prefill is not None else "itself"
        where = computes if self.decode is None else f"{self.decode.info.address}, prompt by {computes}"
        if self.forecast is None:
            return f"{where}: not measured yet"
        return f"{where}: first token in {self.forecast.ttft_s:.3g} s, costs {self.cost_s:.3g} s"

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


class Prices:
    """Of pairs for one answer, at one moment; `num_blocks_now` says what a decode node sets aside of it.

    `token_s` and `answer_token_s` are what a token of a prompt, and of an answer, costs nodes that have not measured
    it; the former is 0 while nobody has.
    """

    def __init__(
        self,
        work: Work,
        prefill: Sequence[Member],
        decode: Sequence[Member],
        calibration: Calibration,
        num_blocks_now: Callable[[Member], int],
    ) -> None:
        self._work = work
        self._num_blocks_now = num_blocks_now
        self._calibration = calibration
        self.token_s = usual_token_s(prefill or decode)
        self.answer_token_s = usual_answer_token_s(decode)

    @property
    def known(self) -> bool:
        """Whether any node has measured how fast it computes prompts."""
        return self.token_s > 0

    def alone(self, prefill: Member) -> Pair:
        """For one token."""
        if not self.known:
            return Pair(prefill, None, None)
        forecast = forecast_handoff(prefill, None, self._work, self.token_s)
        ttft_s = self._calibration.correct_s(Way.ALONE, forecast.ttft_s)
        cost_s = (ttft_s + others_wait_s(prefill, self._work, self.token_s)) / prefill.load.weight
        return Pair(prefill, None, forecast, cost_s)

    def tail(self, decode: Member, work: Work) -> Pair:
        """The decode node computes what it lacks. `work` may know better than ours what that is."""
        if not self.known:
            return Pair(None, decode, None)
        forecast = forecast_tail(decode, work, self.token_s)
        ttft_s = self._calibration.correct_s(Way.TAIL, forecast.ttft_s)
        cost_s = ttft_s + self._held_up_s(decode, work) + self._answer_s(decode, work)
        return Pair(None, decode, forecast, cost_s / decode.load.weight)

    def handoff(self, prefill: Member, decode: Member, work: Work) -> Pair:
        """`work` as `tail`'s."""
        if not self.known:
            return Pair(prefill, decode, None)
        forecast = forecast_handoff(prefill, decode, work, self.token_s)
        ttft_s = self._calibration.correct_s(Way.HANDOFF, forecast.ttft_s)
        cost_s = (ttft_s + others_wait_s(prefill, work, self.token_s)) / prefill.load.weight + self._answer_s(
            decode, work
        ) / decode.load.weight
        return Pair(prefill, decode, forecast, cost_s)

    def _answer_s(self, decode: Member, work: Work) -> float:
        """That the answer takes, behind the prompts computed there, and holds up the sequences beside it; and that it
        takes to compute once more what is evicted there."""
        node, num_cached = decode.load, work.cached_decode.get(decode.info.instance_id, 0)
        lost_s = tokens_lost(node, self._num_blocks_now(decode) - num_cached, work.block_tokens) * (
            node.token_s or self.token_s
        )
        return work.num_counted * (node.answer_token_s or self.answer_token_s) + node.waiting_s + lost_s

    def _held_up_s(self, decode: Member, work: Work) -> float:
        """That the prompt, computed there, holds up the sequences that run there, all together."""
        node = decode.load
        num_uncached = work.num_uncached(work.cached_decode.get(decode.info.instance_id, 0))
        return node.num_rows * num_uncached * (node.token_s or self.token_s)
