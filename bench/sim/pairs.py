"""kvrelay's own choice of nodes: the pair that costs least. Pure."""

from __future__ import annotations

from bench.sim.placing import Known, Settled
from bench.sim.request import SimRequest
from coordinator.forecast import Forecast
from coordinator.foresight import Foresight, Foretold
from coordinator.members import Member
from coordinator.pair_cost import Pair, PairCosts
from coordinator.work import Work


class PairCost:
    """coordinator.pair_cost: the seconds that a pair costs the request and those beside it."""

    name = "pair cost"

    def __init__(self, local_tail_tokens: int = 32, *, learns: bool = True) -> None:
        """`local_tail_tokens` 0: decode nodes compute no prompts. `learns`: forecasts are corrected by what came."""
        self._local_tail_tokens = local_tail_tokens
        self._learns = learns
        self._foresight = Foresight()

    def choose(self, request: SimRequest, known: Known) -> _PairChoice:
        shape = known.shape
        work = Work(
            num_tokens=request.arrival.num_prompt,
            num_positions=known.num_positions,
            block_tokens=shape.block_tokens,
            block_bytes=shape.block_tokens * shape.token_bytes,
            cached_prefill=known.cached_prefill,
            cached_decode=known.cached_decode,
        )
        num_blocks_now = known.num_blocks_now
        costs = PairCosts(
            *(known.prefill, known.decode, work),
            num_blocks_now=lambda member: num_blocks_now,
            local_tail_tokens=self._local_tail_tokens,
            foresight=self._foresight,
        )
        return _PairChoice(costs, self._foresight)

    def forecast(self, request: SimRequest, known: Known) -> Forecast | None:
        pairs = self.choose(request, known).costs.ranked()
        if not pairs or pairs[0].forecast is None:
            return None
        return self._foresight.correct(pairs[0].way, pairs[0].forecast)

    def came(self, foretold: Foretold, now: float) -> None:
        if self._learns:
            self._foresight.first_token(foretold, now)


class _PairChoice:
    def __init__(self, costs: PairCosts, foresight: Foresight) -> None:
        self.costs = costs
        self._foresight = foresight

    @property
    def has_place(self) -> bool:
        return self.costs.has_slot

    def order(self) -> list[Member]:
        return [
            pair.decode
            for pair in self.costs.ranked()
            if pair.decode is not None and (pair.prefill is None or self.has_place)
        ]

    def settle(self, decode: Member, num_cached_blocks: int, now: float) -> Settled | None:
        pair = self.costs.pair_with(decode, num_cached_blocks)
        if pair is None or (pair.prefill is not None and not self.has_place):
            return None
        return Settled(pair.prefill, self._foretold(pair, now))

    def prefill_for(self, decode: Member) -> list[Member]:
        return self.costs.prefill_for(decode)

    def _foretold(self, pair: Pair, now: float) -> Foretold | None:
        forecast = pair.forecast
        if forecast is None:
            return None
        ttft_s = self._foresight.correct_s(pair.way, forecast.ttft_s)
        return Foretold(pair.way, forecast.ttft_s, ttft_s, forecast.itl_s, now)
