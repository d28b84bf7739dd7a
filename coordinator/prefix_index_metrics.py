"""What the prefix indexes count, for whoever scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.prefix_index import PrefixIndex
from kvrelay.types import Role


class PrefixIndexCollector(Collector):
    """Read when scraped, from the scraper's thread."""

    def __init__(self, registry: CollectorRegistry, indexes: Sequence[Mapping[Role, PrefixIndex]]) -> None:
        """`indexes` of each model; they are added up."""
        self._indexes = indexes
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        families: list[GaugeMetricFamily | CounterMetricFamily] = [
            GaugeMetricFamily(
                "kvrelay_prefix_index_blocks",
                "Cached blocks that are known, once a node that has them.",
                labels=["role"],
            ),
            CounterMetricFamily(
                "kvrelay_prefix_index_told_blocks", "Blocks whose coming or going nodes told of.", labels=["role"]
            ),
            CounterMetricFamily(
                "kvrelay_prefix_index_dropped_blocks", "Blocks that were forgotten for want of room.", labels=["role"]
            ),
            CounterMetricFamily(
                "kvrelay_prefix_index_resyncs",
                "Times a node was asked for all it has, having lost count.",
                labels=["role"],
            ),
        ]
        for role in self._indexes[0]:
            counts = [
                (index.num_blocks, index.num_told, index.num_dropped, index.num_resyncs)
                for index in (one[role] for one in self._indexes)
            ]
            values = map(sum, zip(*counts, strict=True))
            for family, value in zip(families, values, strict=True):
                family.add_metric([role.value], value)
        return families
