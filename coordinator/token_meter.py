"""Tokens on their way to clients and the times between them, for Prometheus.

Every token is counted, so this is plain numbers: prometheus_client's own counter and histogram take three locks each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvrelay.metrics import STEP_BUCKETS

_BOUNDS = (*map(floatToGoString, STEP_BUCKETS), "+Inf")


class TokenMeter(Collector):
    """Written on the event loop, read when scraped, from the scraper's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_tokens = 0
        self._num_gaps = [0] * len(_BOUNDS)  # by bucket
        self._gaps_s = 0.0
        registry.register(self)

    def add(self, num_tokens: int, gap_s: float | None) -> None:
        """`gap_s` since the tokens before, shared evenly by these; None for the first ones."""
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._num_gaps[bisect_left(STEP_BUCKETS, gap_s / num_tokens)] += num_tokens
            self._gaps_s += gap_s

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("kvrelay_generation_tokens", "Tokens sent to clients.", value=self._num_tokens)
        buckets = list(zip(_BOUNDS, accumulate(self._num_gaps), strict=True))
        name, meaning = "kvrelay_inter_token_latency_seconds", "Between two tokens of an answer."
        yield HistogramMetricFamily(name, meaning, buckets, self._gaps_s)
