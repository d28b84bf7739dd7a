"""What the coordinator counts and times."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.lifetime import Edge, Stage
from coordinator.token_meter import TokenMeter
from kvrelay.inference import RequestFinished
from kvrelay.metrics import LATENCY_BUCKETS
from kvrelay.types import FinishReason, Role

_WAITING = (Stage.QUEUED, Stage.RESERVING)
_RUNNING = (Stage.PREFILLING, Stage.DECODING)


class CoordinatorMetrics:
    """Edges, gauges and successes count answers, of which a request may have several; all else counts requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=LATENCY_BUCKETS, registry=registry)

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
        self._open_circuits = gauge(
            "kvrelay_circuits_open", "Nodes and links between two that failed lately and are asked last."
        )
        self._usable_nodes = gauge("kvrelay_usable_nodes", "Nodes that take new work.", "model", "role")
        self._running = gauge("kvrelay_requests_running", "Answers that nodes compute.")
        self._waiting = gauge("kvrelay_requests_waiting", "Answers that wait for room.")

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

    def edge(self, edge: Edge, before: Stage | None, after: Stage) -> None:
        self._edges.labels(edge.value).inc()
        for gauge, stages in ((self._waiting, _WAITING), (self._running, _RUNNING)):
            gauge.inc((after in stages) - (before in stages))

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
