"""Gauges by tenant, of however many tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from coordinator.tenant_metrics import TenantMetrics


def test_the_first_fifty_tenants_have_labels_and_the_rest_share_one() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry)

    def queued(tenant: str, name: str = "kvrelay_tenant_queued_answers") -> float | None:
        return registry.get_sample_value(name, {"tenant": tenant})

    for number in range(60):
        metrics.queued(f"t{number}", 2, 30)
    assert (queued("t0"), queued("t49"), queued("t50"), queued("other")) == (2, 2, None, 20)
    assert queued("other", "kvrelay_tenant_queued_tokens") == 300
    for number in range(60):
        metrics.queued(f"t{number}", -2, -30)
    assert (queued("t0"), queued("other")) == (0, 0)
    assert queued("other", "kvrelay_tenant_queued_tokens") == 0
