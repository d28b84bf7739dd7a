"""What a decode node counts."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode_node.engine import StepDone
from decode_node.resume import Resume
from kvrelay.engine.metrics import HandoffMetrics
from kvrelay.metrics import STEP_BUCKETS
from kvrelay.types import Tier

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class DecodeMetrics:
    """One instance a process; every method is the event loop's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoffs = HandoffMetrics(registry)
        self._blocks_received = Counter(
            "kvrelay_handoff_blocks_received_total",
            "Blocks proven and written, whether committed or not.",
            registry=registry,
        )
        self._handoffs_refused = Counter(
            "kvrelay_handoffs_refused_total", "KV streams that were not committed.", ["code"], registry=registry
        )
        self._leases_lapsed = Counter(
            "kvrelay_leases_lapsed_total", "Reservations that nobody renewed.", registry=registry
        )
        self._preemptions = Counter(
            "kvrelay_preemptions_total",
            "Running requests that gave their blocks to an older one, by the way they were to come back.",
            ["resume"],
            registry=registry,
        )
        self._loaded = Counter(
            "kvrelay_preempted_blocks_loaded_total",
            "Blocks that preempted requests got back from the kvstore, by its tier.",
            ["tier"],
            registry=registry,
        )
        for resume in Resume:
            self._preemptions.labels(resume.value)
        self._generated = Counter(
            "kvrelay_decode_tokens_generated_total", "Tokens drawn by this node's steps.", registry=registry
        )
        self._computed = Counter(
            "kvrelay_decode_tokens_computed_total",
            "Positions run through the model by this node's steps.",
            registry=registry,
        )
        self._step_seconds = Histogram(
            "kvrelay_decode_step_seconds", "Duration of one engine step.", buckets=STEP_BUCKETS, registry=registry
        )
        self._batch_rows = Histogram(
            "kvrelay_decode_batch_rows", "Sequences in one engine step.", buckets=BATCH_BUCKETS, registry=registry
        )

        self._bounds = Gauge(
            "kvrelay_decode_step_bound",
            "What the next step may have: rows, and tokens of prompts beside them.",
            ["of"],
            registry=registry,
        )

    def blocks_received(self, num_blocks: int) -> None:
        self._blocks_received.inc(num_blocks)

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        self._handoffs.committed(num_bytes, seconds)

    def handoff_refused(self, code: str) -> None:
        self._handoffs_refused.labels(code).inc()

    def lease_lapsed(self) -> None:
        self._leases_lapsed.inc()

    def blocks_loaded(self, tiers: Sequence[Tier]) -> None:
        for tier in tiers:
            self._loaded.labels(tier.value).inc()

    def stepped(self, step: StepDone) -> None:
        for preempted in step.preempted:
            self._preemptions.labels(preempted.resume.value).inc()
        self._generated.inc(sum(advanced.token is not None for advanced in step.advanced))
        self._computed.inc(step.num_tokens)
        if step.bounds is not None:
            for of, bound in zip(("rows", "prompt_tokens"), step.bounds, strict=True):
                self._bounds.labels(of).set(bound)
        if step.num_rows:
            self._batch_rows.observe(step.num_rows)
            self._step_seconds.observe(step.step_s)
