"""What was forecast of requests against what came: told to whoever counts, and learned from. Pure.

What is worked out from rates leaves things out: the hops between processes, what else a machine does. So for each way
to a first token the line from what was worked out to what came is kept, and applied from a few requests on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from coordinator.forecast import Forecast
from kvrelay.rates import NUM_TRUSTED, Line

SPREAD_S2 = 0.01  # of forecasts (0.1 s, squared), from which on they show more than that all are late alike
ITL_SPREAD_S2 = 1e-4  # as SPREAD_S2: 10 ms, squared
MOST = 4.0  # times what was worked out, at most, and an eighth of a second: something was out of order then
MOST_S = 0.125


class Way(Enum):
    """To the first token."""

    HANDOFF = "handoff"  # computed on a prefill node, and handed over
    TAIL = "tail"  # computed on the decode node
    ALONE = "alone"  # computed on a prefill node, and that is all


@dataclass(frozen=True, slots=True)
class PlacedForecast:
    """Of a request that was just placed. Times are the caller's clock's."""

    way: Way
    worked_out_s: float  # until the first token, by rates alone
    ttft_s: float  # the same, corrected
    itl_s: float  # between two tokens, corrected
    at: float
    worked_out_itl_s: float = 0.0  # by rates alone; 0: not known, and nothing is learned of it


OnCame = Callable[[str, float, float], None]  # "ttft" or "itl", what was forecast and what came, in seconds


class Calibration:
    """Of one model's requests. It grows by no request: a line is a few sums."""

    def __init__(self, on_came: OnCame = lambda what, forecast_s, came_s: None) -> None:
        self.on_came = on_came
        self._lines = {way: Line(slope=1.0, spread=SPREAD_S2) for way in Way}
        self._itl = Line(slope=1.0, spread=ITL_SPREAD_S2)

    def correct_s(self, way: Way, worked_out_s: float) -> float:
        """Until the first token, by what came of others."""
        return _by(self._lines[way], worked_out_s)

    def correct_itl_s(self, worked_out_s: float) -> float:
        """Between two tokens, by what came of others; 0 stays 0, which is not known."""
        return _by(self._itl, worked_out_s) if worked_out_s else 0.0

    def correct(self, way: Way, forecast: Forecast) -> Forecast:
        """What is added or taken is counted as computing: what it is is not known."""
        more_s = self.correct_s(way, forecast.ttft_s) - forecast.ttft_s
        return replace(
            forecast,
            ttft_s=forecast.ttft_s + more_s,
            itl_s=self.correct_itl_s(forecast.itl_s),
            prefill_s=forecast.prefill_s + more_s,
        )

    def first_token(self, placed: PlacedForecast, now: float) -> None:
        came_s = now - placed.at
        most_s = MOST * placed.worked_out_s + MOST_S
        self._lines[placed.way].add(placed.worked_out_s, min(came_s, most_s))
        self.on_came("ttft", placed.ttft_s, came_s)

    def ended(self, placed: PlacedForecast, itl_s: float) -> None:
        """The mean time between two tokens of the whole answer."""
        if placed.worked_out_itl_s > 0:
            self._itl.add(placed.worked_out_itl_s, min(itl_s, MOST * placed.worked_out_itl_s + MOST_S))
        if placed.itl_s > 0:
            self.on_came("itl", placed.itl_s, itl_s)


def _by(line: Line, worked_out_s: float) -> float:
    return line.at(worked_out_s) if line.num_samples >= NUM_TRUSTED else worked_out_s
