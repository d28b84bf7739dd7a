"""What is counted of targets and budgets."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class PolicyMetrics:
    """`label` gives a tenant's label: its name, or one that many share."""

    def __init__(self, registry: CollectorRegistry, label: Callable[[str], str]) -> None:
        self._label = label
        self._refusals = Counter(
            "kvrelay_slo_refusals_total",
            "Requests refused since a target was out of reach, by target: ttft or itl.",
            ["target"],
            registry=registry,
        )
        self._attained = Counter(
            "kvrelay_slo_attained_total",
            "Targets that were kept: ttft once a request, itl once an answer.",
            ["target"],
            registry=registry,
        )
        self._missed = Counter(
            "kvrelay_slo_missed_total",
            "Targets that were not kept, by requests that failed too.",
            ["target"],
            registry=registry,
        )
        self._used = Gauge(
            "kvrelay_tenant_budget_used_ratio",
            "Of the day's tokens, by tenant; of those that share a label, the one that used the most.",
            ["tenant"],
            registry=registry,
        )
        self._alerts = Counter(
            "kvrelay_tenant_budget_alerts_total",
            "Days on which a tenant came to 80 % of its tokens.",
            ["tenant"],
            registry=registry,
        )
        for counter in (self._refusals, self._attained, self._missed):
            for target in ("ttft", "itl"):
                counter.labels(target)
        self._most_used: dict[str, float] = {}  # by label

    def refused(self, target: str) -> None:
        self._refusals.labels(target).inc()

    def judged(self, target: str, attained: bool) -> None:
        (self._attained if attained else self._missed).labels(target).inc()

    def new_day(self) -> None:
        self._used.clear()
        self._most_used.clear()

    def used(self, tenant: str, part: float) -> None:
        """A tenant's part grows in a day, so the greatest of one label is its own, unless many share it."""
        label = self._label(tenant)
        self._most_used[label] = max(part, self._most_used.get(label, 0.0))
        self._used.labels(label).set(self._most_used[label])

    def alerted(self, tenant: str) -> None:
        self._alerts.labels(self._label(tenant)).inc()
