"""What is counted of forecasts: what came, beside what was forecast."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

_ERRORS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)
ERROR_BUCKETS = (*(-error_s for error_s in reversed(_ERRORS_S)), 0.0, *_ERRORS_S)
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


class PredictionMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._errors_s = Histogram(
            "kvrelay_prediction_error_seconds",
            "What came less what was forecast when the request was placed, of ttft: until the first token, itl: "
            "between two of an answer, in the mean.",
            ["of"],
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self._ratios = Histogram(
            "kvrelay_prediction_ratio",
            "As kvrelay_prediction_error_seconds, divided.",
            ["of"],
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        for what in ("ttft", "itl"):
            self._errors_s.labels(what)
            self._ratios.labels(what)

    def came(self, what: str, forecast_s: float, came_s: float) -> None:
        """`what` is "ttft" or "itl"."""
        self._errors_s.labels(what).observe(came_s - forecast_s)
        self._ratios.labels(what).observe(came_s / max(forecast_s, 1e-6))
