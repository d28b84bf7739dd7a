"""What a decode node counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode_node.engine import StepDone
from kvrelay.metrics import LATENCY_BUCKETS, STEP_BUCKETS


class DecodeMetrics:
    """One instance a process; every method is the event loop's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoff_bytes = Counter(
            "kvrelay_handoff_bytes", "Slab bytes of committed handoffs.", registry=registry
        )  # prometheus_client appends _total
        self._blocks_received = Counter(
            "kvrelay_handoff_blocks_received", "Blocks proven and written, whether committed or not.", registry=registry
        )
        self._handoff_seconds = Histogram(
            "kvrelay_handoff_seconds",
            "From BEGIN to the commit of a handoff.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._handoffs_refused = Counter(
            "kvrelay_handoffs_refused", "KV streams that were not committed.", ["code"], registry=registry
        )
        self._leases_lapsed = Counter("kvrelay_leases_lapsed", "Reservations that nobody renewed.", registry=registry)
        self._generated = Counter(
            "kvrelay_decode_tokens_generated", "Tokens drawn by this node's steps.", registry=registry
        )
        self._computed = Counter(
            "kvrelay_decode_tokens_computed", "Positions run through the model by this node's steps.", registry=registry
        )
        self._step_seconds = Histogram(
            "kvrelay_decode_step_seconds", "Duration of one engine step.", buckets=STEP_BUCKETS, registry=registry
        )
        self._batch_rows = Gauge("kvrelay_decode_batch_rows", "Sequences in the latest step.", registry=registry)

    def block_received(self) -> None:
        self._blocks_received.inc()

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        self._handoff_bytes.inc(num_bytes)
        self._handoff_seconds.observe(seconds)

    def handoff_refused(self, code: str) -> None:
        self._handoffs_refused.labels(code).inc()

    def lease_lapsed(self) -> None:
        self._leases_lapsed.inc()

    def stepped(self, step: StepDone) -> None:
        self._generated.inc(sum(advanced.token is not None for advanced in step.advanced))
        self._computed.inc(step.num_tokens)
        self._batch_rows.set(step.num_rows)
        if step.num_rows:
            self._step_seconds.observe(step.step_s)
