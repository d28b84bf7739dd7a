"""What end-to-end tests read of a role's metrics: a sum, or an error for a name that is none."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.support.cluster import sum_of_samples


def exposition() -> str:
    registry = CollectorRegistry()
    Counter("kvrelay_errors", "By code.", ["code"], registry=registry)
    blocks = Gauge("kvrelay_blocks", "By tier.", ["tier"], registry=registry)
    blocks.labels("memory").set(3)
    blocks.labels("disk").set(4)
    Histogram("kvrelay_wait_seconds", "Waits.", registry=registry).observe(2.0)
    return generate_latest(registry).decode()


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("kvrelay_blocks", {}, 7.0),
        ("kvrelay_blocks", {"tier": "disk"}, 4.0),
        ("kvrelay_wait_seconds_sum", {}, 2.0),
        ("kvrelay_wait_seconds_count", {}, 1.0),
        ("kvrelay_errors_total", {"code": "overloaded"}, 0.0),  # not one error yet, and so no sample
    ],
)
def test_samples_are_summed(name: str, labels: dict[str, str], value: float) -> None:
    assert sum_of_samples(exposition(), name, labels) == value


@pytest.mark.parametrize(
    "name", ["kvrelay_error_total", "kvrelay_errors", "kvrelay_blocks_total", "kvrelay_wait_seconds"]
)
def test_a_name_that_no_metric_has_is_an_error(name: str) -> None:
    with pytest.raises(LookupError, match=name):
        sum_of_samples(exposition(), name, {})
