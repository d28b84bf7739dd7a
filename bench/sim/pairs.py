"""kvrelay's own choice of nodes: the pair that costs least. Pure."""

from __future__ import annotations

from bench.sim.placing import Known, Settled
from bench.sim.request import SimRequest
from coordinator.calibration import Calibration, PlacedForecast
from coordinator.forecast import Forecast
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
        self._calibration = Calibration()

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
            calibration=self._calibration,
        )
        return _PairChoice(costs, self._calibration)

    def forecast(self, request: SimRequest, known: Known) -> Forecast | None:
        pairs = self.choose(request, known).costs.ranked()
        if not pairs or pairs[0].forecast is None:
            return None
        return self._calibration.correct(pairs[0].way, pairs[0].forecast)

    def came(self, placed_forecast: PlacedForecast, now: float) -> None:
        if self._learns:
            self._calibration.first_token(placed_forecast, now)


class _PairChoice:
    def __init__(self, costs: PairCosts, calibration: Calibration) -> None:
        self.costs = costs
        self._calibration = calibration

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
        return Settled(pair.prefill, self._placed_forecast(pair, now))

    def prefill_for(self, decode: Member) -> list[Member]:
        return self.costs.prefill_for(decode)

    def _placed_forecast(self, pair: Pair, now: float) -> PlacedForecast | None:
        forecast = pair.forecast
        if forecast is None:
            return None
        ttft_s = self._calibration.correct_s(pair.way, forecast.ttft_s)
        return PlacedForecast(pair.way, forecast.ttft_s, ttft_s, forecast.itl_s, now)
