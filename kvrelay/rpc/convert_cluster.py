"""Messages of cluster.proto, and what a node says of itself in them, to our dataclasses and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

from kvrelay.cluster import (
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheRemoved,
    CacheStored,
    ClusterStatus,
    ModelInfo,
    NodeInfo,
    NodeRates,
    NodeReport,
    NodeStatus,
)
from kvrelay.kv.hashing import HASH_BYTES
from kvrelay.kv.layout import AXES, KVLayout
from kvrelay.limits import DecodeLimits, PrefillLimits, check_weight
from kvrelay.pb import cluster_pb2, types_pb2
from kvrelay.rpc.convert_limits import (
    decode_limits_from_pb,
    decode_limits_to_pb,
    prefill_limits_from_pb,
    prefill_limits_to_pb,
)
from kvrelay.rpc.convert_types import MAX_ID_CHARS, check
from kvrelay.types import BlockCounts, BlockHash, InstanceId, Role

MAX_PROMPTS_TOLD = 64  # more than a prefill node has, unless it is told to take on many

_ROLES = {
    Role.COORDINATOR: types_pb2.ROLE_COORDINATOR,
    Role.PREFILL_NODE: types_pb2.ROLE_PREFILL_NODE,
    Role.DECODE_NODE: types_pb2.ROLE_DECODE_NODE,
    Role.KVSTORE: types_pb2.ROLE_KVSTORE,
}
_ROLES_FROM_PB = {wire: role for role, wire in _ROLES.items()}


def role_to_pb(role: Role) -> types_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_pb(wire: types_pb2.Role.ValueType) -> Role:
    check(wire in _ROLES_FROM_PB, f"role {wire} is unknown")
    return _ROLES_FROM_PB[wire]


def kv_layout_to_pb(layout: KVLayout) -> types_pb2.KVLayout:
    return types_pb2.KVLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        axes=layout.axes,
    )


def kv_layout_from_pb(wire: types_pb2.KVLayout) -> KVLayout:
    check(wire.axes == AXES, f"KV layout: axes are {wire.axes!r}; allowed is {AXES!r}")
    return KVLayout(wire.num_layers, wire.num_kv_heads, wire.head_dim, wire.dtype, wire.block_tokens)


def model_info_to_pb(model: ModelInfo) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        layout=kv_layout_to_pb(model.layout),
        dtype=model.dtype,
        attention_backend=model.attention_backend,
    )


def model_info_from_pb(wire: types_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=wire.name,
        fingerprint=wire.fingerprint,
        architecture=wire.architecture,
        max_model_len=wire.max_model_len,
        vocab_size=wire.vocab_size,
        eos_token_ids=tuple(wire.eos_token_ids),
        layout=kv_layout_from_pb(wire.layout),
        dtype=wire.dtype,
        attention_backend=wire.attention_backend,
    )


def node_info_to_pb(info: NodeInfo) -> cluster_pb2.NodeJoined:
    return cluster_pb2.NodeJoined(
        role=role_to_pb(info.role),
        instance_id=info.instance_id,
        address=info.address,
        model=model_info_to_pb(info.model) if info.model else None,
        protocol_version=info.protocol_version,
    )


def node_info_from_pb(wire: cluster_pb2.NodeJoined) -> NodeInfo:
    check(0 < len(wire.instance_id) <= MAX_ID_CHARS, f"an instance id has 1 to {MAX_ID_CHARS} characters")
    check(bool(wire.address), "a node has to name the address it answers on")
    return NodeInfo(
        role_from_pb(wire.role),
        InstanceId(wire.instance_id),
        wire.address,
        model_info_from_pb(wire.model) if wire.HasField("model") else None,
        wire.protocol_version,
    )


def block_counts_to_pb(counts: BlockCounts) -> cluster_pb2.BlockCounts:
    return cluster_pb2.BlockCounts(
        total=counts.total, free=counts.free, reserved=counts.reserved, held=counts.held, cached=counts.cached
    )


def block_counts_from_pb(wire: cluster_pb2.BlockCounts) -> BlockCounts:
    return BlockCounts(wire.total, wire.free, wire.reserved, wire.held, wire.cached)


def node_rates_to_pb(rates: NodeRates) -> cluster_pb2.NodeRates:
    return cluster_pb2.NodeRates(**dataclasses.asdict(rates))


def node_rates_from_pb(wire: cluster_pb2.NodeRates) -> NodeRates:
    rates = NodeRates(**{field.name: getattr(wire, field.name) for field in dataclasses.fields(NodeRates)})
    for name, value in dataclasses.asdict(rates).items():
        check(0 <= value < math.inf, f"{name} is {value:g}; allowed is at least 0, finite")
    return rates


def node_status_to_pb(status: NodeStatus) -> cluster_pb2.NodeStatus:
    limits = status.limits
    return cluster_pb2.NodeStatus(
        ready=status.ready,
        draining=status.draining,
        blocks=block_counts_to_pb(status.blocks),
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_slots_free=status.num_slots_free,
        num_reservations=status.num_reservations,
        memory_bytes=status.memory_bytes,
        disk_bytes=status.disk_bytes,
        decode_limits=decode_limits_to_pb(limits) if isinstance(limits, DecodeLimits) else None,
        prefill_limits=prefill_limits_to_pb(limits) if isinstance(limits, PrefillLimits) else None,
        not_ready_reason=status.not_ready_reason,
        rates=node_rates_to_pb(status.rates),
        num_waiting_tokens=status.num_waiting_tokens,
        weight=status.weight,
        step_tokens=status.step_tokens,
        prompt_tokens=status.prompt_tokens[:MAX_PROMPTS_TOLD],
    )


def node_status_from_pb(wire: cluster_pb2.NodeStatus) -> NodeStatus:
    return NodeStatus(
        ready=wire.ready,
        draining=wire.draining,
        blocks=block_counts_from_pb(wire.blocks),
        num_running=wire.num_running,
        num_waiting=wire.num_waiting,
        num_slots_free=wire.num_slots_free,
        num_reservations=wire.num_reservations,
        memory_bytes=wire.memory_bytes,
        disk_bytes=wire.disk_bytes,
        limits=_limits_from_pb(wire),
        not_ready_reason=wire.not_ready_reason,
        rates=node_rates_from_pb(wire.rates),
        num_waiting_tokens=wire.num_waiting_tokens,
        weight=_weight_from_pb(wire),
        step_tokens=wire.step_tokens,
        prompt_tokens=_prompt_tokens_from_pb(wire),
    )


def _weight_from_pb(wire: cluster_pb2.NodeStatus) -> float:
    weight = wire.weight if wire.HasField("weight") else 1.0
    check_weight(weight)
    return weight


def _prompt_tokens_from_pb(wire: cluster_pb2.NodeStatus) -> tuple[int, ...]:
    num_told = len(wire.prompt_tokens)
    check(num_told <= MAX_PROMPTS_TOLD, f"{num_told} prompt_tokens are told; allowed are at most {MAX_PROMPTS_TOLD}")
    return tuple(wire.prompt_tokens)


def _limits_from_pb(wire: cluster_pb2.NodeStatus) -> DecodeLimits | PrefillLimits | None:
    if wire.HasField("decode_limits"):
        return decode_limits_from_pb(wire.decode_limits)
    return prefill_limits_from_pb(wire.prefill_limits) if wire.HasField("prefill_limits") else None


def cache_events_to_pb(told: CacheEvents) -> cluster_pb2.CacheEvents:
    return cluster_pb2.CacheEvents(
        first_sequence=told.first_sequence, events=[_cache_event_to_pb(event) for event in told.events]
    )


def cache_events_from_pb(wire: cluster_pb2.CacheEvents) -> CacheEvents:
    check(wire.first_sequence >= 1, "cache events are numbered from 1")
    check(bool(wire.events), "a message of cache events holds none")
    return CacheEvents(wire.first_sequence, tuple(_cache_event_from_pb(event) for event in wire.events))


def _cache_event_to_pb(event: CacheEvent) -> cluster_pb2.CacheEvent:
    match event:
        case CacheStored(hashes):
            return cluster_pb2.CacheEvent(stored=cluster_pb2.CachedBlocks(block_hashes=hashes))
        case CacheRemoved(hashes):
            return cluster_pb2.CacheEvent(removed=cluster_pb2.CachedBlocks(block_hashes=hashes))
        case CacheCleared():
            return cluster_pb2.CacheEvent(cleared=cluster_pb2.CacheCleared())


def _cache_event_from_pb(wire: cluster_pb2.CacheEvent) -> CacheEvent:
    which = wire.WhichOneof("event")
    check(which is not None, "a cache event is one of stored, removed and cleared")
    if which == "cleared":
        return CacheCleared()
    hashes = _block_hashes(wire.stored if which == "stored" else wire.removed)
    return CacheStored(hashes) if which == "stored" else CacheRemoved(hashes)


def _block_hashes(wire: cluster_pb2.CachedBlocks) -> list[BlockHash]:
    hashes = cast(list[BlockHash], list(wire.block_hashes))
    check(bool(hashes), "a cache event names no block")
    check(set(map(len, hashes)) == {HASH_BYTES}, f"a block hash has {HASH_BYTES} bytes")
    return hashes


def cluster_status_to_pb(status: ClusterStatus) -> cluster_pb2.GetStatusReply:
    return cluster_pb2.GetStatusReply(
        nodes=_reports_to_pb(status.nodes),
        num_queued=status.num_queued,
        num_running=status.num_running,
        ready=status.ready,
    )


def _reports_to_pb(reports: Sequence[NodeReport]) -> list[cluster_pb2.NodeReport]:
    return [
        cluster_pb2.NodeReport(
            node=node_info_to_pb(report.info),
            status=node_status_to_pb(report.status),
            age_s=report.age_s,
        )
        for report in reports
    ]


def cluster_status_from_pb(wire: cluster_pb2.GetStatusReply) -> ClusterStatus:
    nodes = tuple(
        NodeReport(node_info_from_pb(report.node), node_status_from_pb(report.status), report.age_s)
        for report in wire.nodes
    )
    return ClusterStatus(nodes, wire.num_queued, wire.num_running, wire.ready)
