"""The HTTP endpoint of metrics, and the gauge of KV blocks."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvrelay.errors import ConfigError
from kvrelay.metrics import LATENCY_BUCKETS, STEP_BUCKETS, new_registry, serve


def test_the_endpoint_serves_the_registry_until_closed() -> None:
    server = serve(new_registry("kvstore", "1f2e", "0.1.0"), "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    finally:
        server.close()

    assert 'kvrelay_build_info{instance="1f2e",role="kvstore",version="0.1.0"} 1.0' in text
    assert "process_resident_memory_bytes" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)


def test_no_created_series_are_exposed() -> None:
    registry = new_registry()
    Counter("kvrelay_things", "Things.", registry=registry).inc()
    Histogram("kvrelay_waits", "Waits.", registry=registry).observe(1.0)
    text = generate_latest(registry).decode()
    assert "kvrelay_things_total 1.0" in text
    assert "_created" not in text


def test_a_port_in_use_is_a_configuration_error() -> None:
    server = serve(CollectorRegistry(), "127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=rf"metrics port {server.port} on 127\.0\.0\.1 cannot be opened"):
            serve(CollectorRegistry(), "127.0.0.1", server.port)
    finally:
        server.close()


def test_buckets_ascend() -> None:
    for buckets in (LATENCY_BUCKETS, STEP_BUCKETS):
        assert sorted(set(buckets)) == list(buckets)
