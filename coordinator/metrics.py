"""What the coordinator counts and times."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.lifetime import Edge, Stage
from coordinator.token_meter import TokenMeter
from kvrelay.inference import RequestFinished
from kvrelay.metrics import LATENCY_BUCKETS
from kvrelay.types import FinishReason, Role

MAX_TENANT_LABELS = 50
OTHER_TENANTS = "other"
_ERRORS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
)
ERROR_BUCKETS = (*(-error_s for error_s in reversed(_ERRORS_S)), 0.0, *_ERRORS_S)
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_WAITING = (Stage.QUEUED, Stage.RESERVING)
_RUNNING = (Stage.PREFILLING, Stage.DECODING)


class CoordinatorMetrics:
    """Edges, gauges and successes count answers, of which a request may have several; all else counts requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._first_token = histogram(
            "kvrelay_time_to_first_token_seconds", "From acceptance until the first token left for the client."
        )
        self._tokens = TokenMeter(registry)
        self._end_to_end = histogram("kvrelay_e2e_request_latency_seconds", "From acceptance until the end.")
        self._queue_time = histogram(
            "kvrelay_request_queue_time_seconds", "From acceptance until a node had room for the request."
        )
        self._prompt_tokens = counter("kvrelay_prompt_tokens_total", "Prompt tokens of finished requests.")
        self._cached_tokens = counter(
            "kvrelay_cached_prompt_tokens_total", "Prompt tokens that were not computed again, by tier.", "tier"
        )
        self._successes = counter("kvrelay_request_success_total", "Complete answers, by how they ended.", "reason")
        self._errors = counter("kvrelay_errors_total", "Requests that failed or were refused, by error code.", "code")
        self._retries = counter("kvrelay_retries_total", "Attempts after a node failed, by its kind.", "kind")
        self._edges = counter("kvrelay_request_edges_total", "Steps in the lives of answers.", "edge")
        self._attached = counter(
            "kvrelay_attached_total",
            "Requests sent again that went on with one that ran or was kept; counted nowhere else.",
        )
        self._kept_bytes = gauge("kvrelay_kept_bytes", "Of answers that may be read again, those that grow included.")
        self._responses = counter(
            "kvrelay_response_cache_lookups_total",
            "Greedy requests looked for among answers that are there; a hit is counted nowhere else.",
            "outcome",
        )
        self._response_bytes = gauge("kvrelay_response_cache_bytes", "Of answers that may be given again.")
        self._open_circuits = Gauge(
            "kvrelay_circuits_open",
            "Nodes and links between two that failed lately and are asked last.",
            registry=registry,
        )
        self._usable_nodes = gauge("kvrelay_usable_nodes", "Nodes that take new work.", "model", "role")
        self._running = Gauge("kvrelay_requests_running", "Answers that nodes compute.", registry=registry)
        self._waiting = Gauge("kvrelay_requests_waiting", "Answers that wait for room.", registry=registry)
        self._queued = gauge(
            "kvrelay_tenant_queued_answers",
            f"Places in the queue that are taken, by tenant: the first {MAX_TENANT_LABELS} by name, the rest as other.",
            "tenant",
        )
        self._queued_tokens = gauge(
            "kvrelay_tenant_queued_tokens", "Tokens that those want, of prompts and max_tokens.", "tenant"
        )
        self._tenant_labels: set[str] = set()
        self._errors_s = Histogram(
            "kvrelay_prediction_error_seconds",
            "What came less what was foretold when the request was placed, of ttft: until the first token, itl: "
            "between two of an answer, in the mean.",
            ["of"],
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self._ratios = Histogram(
            "kvrelay_prediction_ratio",
            "As kvrelay_prediction_error_seconds, divided.",
            ["of"],
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        for what in ("ttft", "itl"):
            self._errors_s.labels(what)
            self._ratios.labels(what)

    def watch_circuits(self, num_open: Callable[[], int]) -> None:
        """`num_open` is called by whoever scrapes, on another thread."""
        self._open_circuits.set_function(num_open)

    def watch_kept(self, num_bytes: Callable[[], int]) -> None:
        """As watch_circuits."""
        self._kept_bytes.set_function(num_bytes)

    def watch_responses(self, num_bytes: Callable[[], int]) -> None:
        """As watch_circuits."""
        self._response_bytes.set_function(num_bytes)

    def looked_for_response(self, *, found: bool) -> None:
        self._responses.labels("hit" if found else "miss").inc()

    def attached(self) -> None:
        self._attached.inc()

    def usable_nodes(self, model: str, role: Role, num_nodes: int) -> None:
        """Of one of the coordinator's models."""
        self._usable_nodes.labels(model, role.value).set(num_nodes)

    def came(self, what: str, foretold_s: float, came_s: float) -> None:
        """`what` is "ttft" or "itl"."""
        self._errors_s.labels(what).observe(came_s - foretold_s)
        self._ratios.labels(what).observe(came_s / max(foretold_s, 1e-6))

    def edge(self, edge: Edge, before: Stage | None, after: Stage) -> None:
        self._edges.labels(edge.value).inc()
        for gauge, stages in ((self._waiting, _WAITING), (self._running, _RUNNING)):
            gauge.inc((after in stages) - (before in stages))

    def queued(self, tenant: str, num_answers: int, num_tokens: int) -> None:
        """So many more, or fewer, of the tenant's wait."""
        label = self.tenant_label(tenant)
        self._queued.labels(label).inc(num_answers)
        self._queued_tokens.labels(label).inc(num_tokens)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """`gap_s` since the tokens before; None for the first ones."""
        self._tokens.add(num_tokens, gap_s)

    def answered(self, reason: FinishReason) -> None:
        self._successes.labels(reason.value).inc()

    def finished(self, finished: RequestFinished) -> None:
        """Once a request, however many answers it has."""
        self._end_to_end.observe(finished.timing.total_s)
        self._queue_time.observe(finished.timing.queue_s)
        self._prompt_tokens.inc(finished.usage.prompt_tokens)
        for tier in ("device", "memory", "disk"):
            self._cached_tokens.labels(tier).inc(getattr(finished.usage.cached, tier))

    def failed(self, code: str) -> None:
        self._errors.labels(code).inc()

    def retried(self, kind: str) -> None:
        self._retries.labels(kind).inc()

    def tenant_label(self, tenant: str) -> str:
        """A tenant keeps its label: what it adds to a gauge it takes from there again."""
        if tenant not in self._tenant_labels and len(self._tenant_labels) < MAX_TENANT_LABELS:
            self._tenant_labels.add(tenant)
        return tenant if tenant in self._tenant_labels else OTHER_TENANTS
