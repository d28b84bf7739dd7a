"""The store's Prometheus metrics: its own counts, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.stats import StoreStats


class StoreCollector(Collector):
    """`stats` is called from the scraper's thread; it only reads integers."""

    def __init__(self, registry: CollectorRegistry, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        blocks = GaugeMetricFamily("kvrelay_store_blocks", "Blocks held.", labels=["tier"])
        used = GaugeMetricFamily("kvrelay_store_bytes", "Bytes of the blocks held.", labels=["tier"])
        capacity = GaugeMetricFamily("kvrelay_store_capacity_bytes", "Bytes it may hold.", labels=["tier"])
        hits = CounterMetricFamily("kvrelay_store_hits", "Blocks served.", labels=["tier"])
        evictions = CounterMetricFamily("kvrelay_store_evictions", "Blocks dropped to make room.", labels=["tier"])
        for tier, holdings in (("memory", stats.memory), ("disk", stats.disk)):
            blocks.add_metric([tier], holdings.num_blocks)
            used.add_metric([tier], holdings.num_bytes)
            capacity.add_metric([tier], holdings.capacity_bytes)
            hits.add_metric([tier], holdings.hits)
            evictions.add_metric([tier], holdings.evictions)
        yield from (blocks, used, capacity, hits, evictions)
        yield CounterMetricFamily("kvrelay_store_misses", "Blocks asked for and not served.", stats.misses)
        yield CounterMetricFamily("kvrelay_store_corrupt", "Blocks that failed their proof.", stats.corrupt)
        yield CounterMetricFamily(
            "kvrelay_store_write_failures", "Blocks that were not written to disk.", stats.write_failures
        )
        yield CounterMetricFamily("kvrelay_store_refused", "Blocks put that a tier had no room for.", stats.refused)
        yield CounterMetricFamily(
            "kvrelay_store_not_worth", "Blocks not written: such ones are hardly used again.", stats.not_worth
        )
        yield CounterMetricFamily("kvrelay_store_expired", "Blocks whose time was over.", stats.expired)
        yield CounterMetricFamily("kvrelay_store_wipes", "Times the disk tier had to start empty.", stats.wipes)
        yield GaugeMetricFamily("kvrelay_store_pinned_blocks", "Blocks pinned now.", stats.num_pinned)
        yield GaugeMetricFamily("kvrelay_store_file_bytes", "Size of the LMDB file.", stats.file_bytes)
        yield GaugeMetricFamily(
            "kvrelay_store_disk_writing", "1 while the disk tier takes blocks, 0 while it refuses.", stats.disk_writing
        )
