"""What a prefill node counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrelay.engine.metrics import HandoffMetrics
from kvrelay.metrics import LATENCY_BUCKETS
from kvrelay.types import CachedTokens
from prefill_node.sender import HandoffReport


class PrefillMetrics:
    """One instance a process; every method is the event loop's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._computed = Counter(
            "kvrelay_prefill_tokens_computed_total", "Prompt tokens whose KV was computed here.", registry=registry
        )
        self._cached = Counter(
            "kvrelay_prefill_tokens_cached_total",
            "Prompt tokens whose KV was found, by the tier it was found in.",
            ["tier"],
            registry=registry,
        )
        self._store_hits = Counter(
            "kvrelay_store_hits_total", "Blocks loaded from the kvstore, by its tier.", ["tier"], registry=registry
        )
        self._loads = Counter(
            "kvrelay_store_load_outcomes_total",
            "Prompts with blocks to ask the kvstore for, by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self._load_tokens = Counter(
            "kvrelay_store_load_tokens_total", "Prompt tokens that loads brought, complete or not.", registry=registry
        )
        self._load_s = Histogram(
            "kvrelay_store_load_seconds",
            "From asking the kvstore for a prompt's blocks to the end of it.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._handoffs = HandoffMetrics(registry)
        self._compute_s = Histogram(
            "kvrelay_prefill_seconds",
            "From a prompt's start to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._tail_s = Histogram(
            "kvrelay_handoff_tail_seconds",
            "From a prompt's first token to its handoff's commit: what a handoff adds after the last chunk.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._step_tokens = Gauge(
            "kvrelay_prefill_step_tokens", "Prompt tokens that a step computes at most, as of now.", registry=registry
        )
        for tier in ("device", "memory", "disk"):
            self._cached.labels(tier)

    def step_bound(self, num_tokens: int) -> None:
        self._step_tokens.set(num_tokens)

    def started(self, cached: CachedTokens, block_tokens: int) -> None:
        for tier in ("device", "memory", "disk"):
            self._cached.labels(tier).inc(getattr(cached, tier))
        for tier in ("memory", "disk"):
            self._store_hits.labels(tier).inc(getattr(cached, tier) // block_tokens)

    def loaded(self, outcome: str, seconds: float, num_tokens: int) -> None:
        self._loads.labels(outcome).inc()
        self._load_tokens.inc(num_tokens)
        self._load_s.observe(seconds)

    def computed(self, num_tokens: int, compute_s: float) -> None:
        self._computed.inc(num_tokens)
        self._compute_s.observe(compute_s)

    def handed_off(self, report: HandoffReport) -> None:
        self._handoffs.committed(report.num_bytes, report.handoff_s)
        self._tail_s.observe(report.tail_s)
