"""What prefill and decode nodes both show: how full they are, their handoffs, their use of the kvstore."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.cluster import NodeStatus
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.offload import Offloader
from kvrelay.metrics import LATENCY_BUCKETS


class NodeCollector(Collector):
    """Blocks and requests; read when scraped, from the scraper's thread, so `status` returns a snapshot."""

    def __init__(
        self, registry: CollectorRegistry, status: Callable[[], NodeStatus], num_evictions: Callable[[], int]
    ) -> None:
        self._status = status
        self._num_evictions = num_evictions
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        blocks = GaugeMetricFamily("kvrelay_kv_blocks", "Blocks of the node's KV pool by state.", labels=["state"])
        for state in ("free", "reserved", "held", "cached"):
            blocks.add_metric([state], getattr(status.blocks, state))
        yield blocks
        yield GaugeMetricFamily(
            "kvrelay_node_weight", "Its part of the requests beside other nodes' weights; 0: none.", value=status.weight
        )
        yield CounterMetricFamily(
            "kvrelay_kv_evictions", "Cached blocks that gave way to new ones.", value=self._num_evictions()
        )
        yield GaugeMetricFamily("kvrelay_requests_running", "Requests in the engine's work.", value=status.num_running)
        yield GaugeMetricFamily(
            "kvrelay_requests_waiting", "Requests that wait for their turn in the engine.", value=status.num_waiting
        )


class StoreClientCollector(Collector):
    """The counts that a node's client of the kvstore keeps; read when scraped, from the scraper's thread."""

    def __init__(self, registry: CollectorRegistry, store: BlockStore, offloader: Offloader) -> None:
        self._store = store
        self._offloader = offloader
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        store, offloader = self._store, self._offloader
        for name, meaning, value in (
            ("failures", "Calls to the kvstore that failed.", store.num_failures),
            ("corrupt", "Blocks from the kvstore that could not be proven.", store.num_corrupt),
            ("offloaded", "Blocks the kvstore took that it did not have.", offloader.num_stored),
            ("dropped", "Blocks that were not offered to the kvstore for want of room.", offloader.num_dropped),
        ):
            yield CounterMetricFamily(f"kvrelay_store_{name}", meaning, value=value)


class HandoffMetrics:
    """Handoffs that were committed, as either end of them sees it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._num_bytes = Counter("kvrelay_handoff_bytes_total", "Slab bytes of committed handoffs.", registry=registry)
        self._seconds = Histogram(
            "kvrelay_handoff_seconds",
            "From a handoff's first frame to its commit; overlaps with computing.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def committed(self, num_bytes: int, seconds: float) -> None:
        self._num_bytes.inc(num_bytes)
        self._seconds.observe(seconds)
