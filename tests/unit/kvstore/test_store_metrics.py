from prometheus_client import CollectorRegistry

from kvstore.metrics import StoreCollector
from kvstore.stats import StoreStats, TierHoldings


def test_every_count_of_the_store_is_exported() -> None:
    stats = StoreStats(
        memory=TierHoldings(num_blocks=1, num_bytes=2, capacity_bytes=3, hits=4, evictions=5),
        disk=TierHoldings(num_blocks=6, num_bytes=7, capacity_bytes=8, hits=9, evictions=10),
        misses=11,
        corrupt=12,
        write_failures=13,
        refused=14,
        expired=15,
        not_worth=19,
        num_pinned=16,
        file_bytes=17,
        disk_writing=True,
        wipes=18,
    )
    registry = CollectorRegistry()
    StoreCollector(registry, lambda: stats)
    expected = {
        ("kvrelay_store_blocks", "memory"): 1,
        ("kvrelay_store_bytes", "memory"): 2,
        ("kvrelay_store_capacity_bytes", "memory"): 3,
        ("kvrelay_store_hits_total", "memory"): 4,
        ("kvrelay_store_evictions_total", "memory"): 5,
        ("kvrelay_store_blocks", "disk"): 6,
        ("kvrelay_store_bytes", "disk"): 7,
        ("kvrelay_store_capacity_bytes", "disk"): 8,
        ("kvrelay_store_hits_total", "disk"): 9,
        ("kvrelay_store_evictions_total", "disk"): 10,
        ("kvrelay_store_misses_total", None): 11,
        ("kvrelay_store_corrupt_total", None): 12,
        ("kvrelay_store_write_failures_total", None): 13,
        ("kvrelay_store_refused_total", None): 14,
        ("kvrelay_store_expired_total", None): 15,
        ("kvrelay_store_not_worth_total", None): 19,
        ("kvrelay_store_pinned_blocks", None): 16,
        ("kvrelay_store_file_bytes", None): 17,
        ("kvrelay_store_disk_writing", None): 1,
        ("kvrelay_store_wipes_total", None): 18,
    }
    for (name, tier), value in expected.items():
        assert registry.get_sample_value(name, {"tier": tier} if tier else {}) == value
