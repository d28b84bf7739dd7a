"""What a prefill node counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.kv.remote import Offloader, StoreClient
from kvrelay.metrics import LATENCY_BUCKETS, BlockGauge
from kvrelay.types import BlockCounts, CachedTokens
from prefill_node.engine import PrefillOutput
from prefill_node.sender import HandoffReport


class PrefillMetrics:
    """Belongs to the event loop; `blocks` gives a snapshot to whoever scrapes."""

    def __init__(self, registry: CollectorRegistry, blocks: Callable[[], BlockCounts]) -> None:
        self._registry = registry
        BlockGauge(registry, blocks)
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
        self._handoff_bytes = Counter(
            "kvrelay_handoff_bytes_total", "Slab bytes of committed handoffs.", registry=registry
        )
        self._handoff_s = Histogram(
            "kvrelay_handoff_seconds",
            "From a handoff's first frame to its commit; overlaps with computing.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._compute_s = Histogram(
            "kvrelay_prefill_seconds",
            "From a prompt's start to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._evictions = Counter(
            "kvrelay_kv_evictions_total", "Cached blocks that gave way to new ones.", registry=registry
        )
        self._num_evictions = 0
        self._running = Gauge("kvrelay_requests_running", "Prompts that hold blocks.", registry=registry)
        self._waiting = Gauge("kvrelay_requests_waiting", "Prompts that wait for blocks or a slot.", registry=registry)
        for tier in ("device", "memory", "disk"):
            self._cached.labels(tier)

    def watch_store(self, store: StoreClient, offloader: Offloader) -> None:
        """Shows the counts that the kvstore's client keeps itself."""
        self._registry.register(_StoreCollector(store, offloader))

    def stepped(self, output: PrefillOutput) -> None:
        self._running.set(output.num_running)
        self._waiting.set(output.num_waiting)
        self._evictions.inc(output.num_evictions - self._num_evictions)
        self._num_evictions = output.num_evictions

    def started(self, cached: CachedTokens, block_tokens: int) -> None:
        for tier in ("device", "memory", "disk"):
            self._cached.labels(tier).inc(getattr(cached, tier))
        for tier in ("memory", "disk"):
            self._store_hits.labels(tier).inc(getattr(cached, tier) // block_tokens)

    def computed(self, num_tokens: int, compute_s: float) -> None:
        self._computed.inc(num_tokens)
        self._compute_s.observe(compute_s)

    def handed_off(self, report: HandoffReport) -> None:
        self._handoff_bytes.inc(report.num_bytes)
        self._handoff_s.observe(report.handoff_s)


class _StoreCollector(Collector):
    def __init__(self, store: StoreClient, offloader: Offloader) -> None:
        self._store = store
        self._offloader = offloader

    def collect(self) -> Iterable[Metric]:
        store, offloader = self._store, self._offloader
        for name, meaning, value in (
            ("failures", "Calls to the kvstore that failed.", store.num_failures),
            ("corrupt", "Blocks from the kvstore that could not be proven.", store.num_corrupt),
            ("offloaded", "Blocks the kvstore took that it did not have.", offloader.num_stored),
            ("dropped", "Blocks that were not offered to the kvstore for want of room.", offloader.num_dropped),
        ):
            yield CounterMetricFamily(f"kvrelay_store_{name}", meaning, value=value)
