"""What is counted by tenant: of more than can be told apart, the rest together."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

MAX_TENANT_LABELS = 50
OTHER_TENANTS = "other"


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._queued = Gauge(
            "kvrelay_tenant_queued_answers",
            f"Places in the queue that are taken, by tenant: the first {MAX_TENANT_LABELS} by name, the rest as other.",
            ["tenant"],
            registry=registry,
        )
        self._queued_tokens = Gauge(
            "kvrelay_tenant_queued_tokens",
            "Tokens that those want, of prompts and max_tokens.",
            ["tenant"],
            registry=registry,
        )
        self._labels: set[str] = set()

    def label(self, tenant: str) -> str:
        """A tenant keeps its label: what it adds to a gauge it takes from there again."""
        if tenant not in self._labels and len(self._labels) < MAX_TENANT_LABELS:
            self._labels.add(tenant)
        return tenant if tenant in self._labels else OTHER_TENANTS

    def queued(self, tenant: str, num_answers: int, num_tokens: int) -> None:
        """So many more, or fewer, of the tenant's wait."""
        label = self.label(tenant)
        self._queued.labels(label).inc(num_answers)
        self._queued_tokens.labels(label).inc(num_tokens)
