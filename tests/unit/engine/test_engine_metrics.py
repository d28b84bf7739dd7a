"""What prefill and decode nodes both show to whoever scrapes them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.cluster import NodeStatus
from kvrelay.engine.metrics import HandoffMetrics, NodeCollector, StoreClientCollector
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.offload import Offloader
from kvrelay.kv.remote import StoreClient
from kvrelay.types import BlockCounts, BlockHash


def samples(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_node_is_read_when_scraped() -> None:
    registry = CollectorRegistry()
    statuses = [
        NodeStatus(),
        NodeStatus(blocks=BlockCounts(total=10, free=1, reserved=2, held=3, cached=4), num_running=5, num_waiting=6),
    ]
    NodeCollector(registry, lambda: statuses[-1], lambda: 7)

    assert samples(registry) == [
        'kvrelay_kv_blocks{state="free"} 1.0',
        'kvrelay_kv_blocks{state="reserved"} 2.0',
        'kvrelay_kv_blocks{state="held"} 3.0',
        'kvrelay_kv_blocks{state="cached"} 4.0',
        "kvrelay_node_weight 1.0",
        "kvrelay_kv_evictions_total 7.0",
        "kvrelay_requests_running 5.0",
        "kvrelay_requests_waiting 6.0",
    ]


async def test_the_counts_of_a_store_client_are_shown() -> None:
    async def read(block_hash: BlockHash) -> bytes | None:
        return None

    registry = CollectorRegistry()
    store = StoreClient("127.0.0.1:1", KVLayout(1, 1, 4, "float32"), "ab" * 32)
    offloader = Offloader(store, read)
    StoreClientCollector(registry, store, offloader)
    store.num_failures, store.num_corrupt, offloader.num_stored, offloader.num_dropped = 1, 2, 3, 4

    assert samples(registry) == [
        "kvrelay_store_failures_total 1.0",
        "kvrelay_store_corrupt_total 2.0",
        "kvrelay_store_offloaded_total 3.0",
        "kvrelay_store_dropped_total 4.0",
    ]
    await store.close()


def test_committed_handoffs_are_counted_and_timed() -> None:
    registry = CollectorRegistry()
    handoffs = HandoffMetrics(registry)
    handoffs.committed(4096, 0.5)
    handoffs.committed(1024, 0.25)

    assert registry.get_sample_value("kvrelay_handoff_bytes_total") == 5120
    assert registry.get_sample_value("kvrelay_handoff_seconds_count") == 2
    assert registry.get_sample_value("kvrelay_handoff_seconds_sum") == 0.75
