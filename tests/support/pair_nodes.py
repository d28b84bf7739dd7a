"""Nodes as a coordinator sees them, for placing requests in tests: a prompt token takes a prefill node 1 ms."""

from __future__ import annotations

from coordinator.members import Member
from kvrelay.cluster import NodeInfo, NodeRates, NodeStatus
from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.types import BlockCounts, InstanceId, Role

BLOCK_TOKENS, BLOCK_BYTES = 16, 16_000


def prefill_node(
    name: str = "p1",
    *,
    rate: float = 1_000.0,
    link: float = 0.0,
    store: float = 0.0,
    running: int = 0,
    waiting_tokens: int = 0,
    slots: int = 4,
    total: int = 1_000,
    cached: int = 0,
    weight: float = 1.0,
) -> Member:
    status = NodeStatus(
        ready=True,
        blocks=BlockCounts(total=total, free=total - cached, cached=cached),
        num_running=running,
        num_slots_free=slots,
        limits=PrefillLimits(max_batched_tokens=512, chunk_tokens=512, max_prefills=4, max_waiting=4),
        rates=NodeRates(prefill_tokens_per_s=rate, handoff_bytes_per_s=link, store_bytes_per_s=store),
        num_waiting_tokens=waiting_tokens,
        weight=weight,
    )
    return Member(NodeInfo(Role.PREFILL_NODE, InstanceId(name), name, None), status, 0.0)


def decode_node(
    name: str = "d1",
    *,
    rate: float = 0.0,
    running: int = 0,
    step_s: float = 0.0,
    row_s: float = 0.0,
    waiting_tokens: int = 0,
    max_batch: int = 64,
    total: int = 1_000,
    free: int = 1_000,
    cached: int = 0,
    weight: float = 1.0,
) -> Member:
    status = NodeStatus(
        ready=True,
        blocks=BlockCounts(total=total, free=free, held=total - free - cached, cached=cached),
        num_running=running,
        num_slots_free=64,
        limits=DecodeLimits(max_batch=max_batch, max_batched_tokens=512),
        rates=NodeRates(prefill_tokens_per_s=rate, step_s=step_s, step_row_s=row_s),
        num_waiting_tokens=waiting_tokens,
        weight=weight,
    )
    return Member(NodeInfo(Role.DECODE_NODE, InstanceId(name), name, None), status, 0.0)
