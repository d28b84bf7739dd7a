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
        blocks = GaugeMetricFamily(
            "kvrelay_prefix_index_blocks", "Cached blocks that are known, once for each node.", labels=["role"]
        )
        told, dropped, clears, resyncs = (
            CounterMetricFamily(f"kvrelay_prefix_index_{name}", meaning, labels=["role"])
            for name, meaning in (
                ("told_blocks", "Blocks that nodes said had come or gone."),
                ("dropped_blocks", "Blocks that were forgotten for want of room."),
                ("clears", "Times a node began to tell of all it has: when it joins, is asked, or has much to tell."),
                ("resyncs", "Times a node was asked for all it has since events were missing."),
            )
        )
        for role in self._indexes[0]:
            indexes = [of_model[role] for of_model in self._indexes]
            blocks.add_metric([role.value], sum(index.num_blocks for index in indexes))
            told.add_metric([role.value], sum(index.num_told for index in indexes))
            dropped.add_metric([role.value], sum(index.num_dropped for index in indexes))
            clears.add_metric([role.value], sum(index.num_clears for index in indexes))
            resyncs.add_metric([role.value], sum(index.num_resyncs for index in indexes))
        return (blocks, told, dropped, clears, resyncs)
