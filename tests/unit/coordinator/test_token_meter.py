"""Tokens and the times between them, as Prometheus gets them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from coordinator.token_meter import TokenMeter
from kvrelay.metrics import STEP_BUCKETS


def test_it_tells_what_prometheus_own_counter_and_histogram_do() -> None:
    """Also of a gap that is a bucket's very bound, and of one beyond the last."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    meter = TokenMeter(ours)
    tokens = Counter("kvrelay_generation_tokens_total", "Tokens sent to clients.", registry=theirs)
    gaps = Histogram(
        "kvrelay_inter_token_latency_seconds", "Between two tokens of an answer.", buckets=STEP_BUCKETS, registry=theirs
    )
    for num_tokens, gap_s in ((1, None), (1, 0.0005), (4, 0.5), (1, 0.05), (2, 64.0)):
        meter.add(num_tokens, gap_s)
        tokens.inc(num_tokens)
        for _ in range(num_tokens if gap_s is not None else 0):
            gaps.observe((gap_s or 0.0) / num_tokens)
    shown = set(generate_latest(ours).decode().splitlines())
    assert shown == {line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line}
    assert "kvrelay_inter_token_latency_seconds_count 8.0" in shown
