"""Messages of kvstore.proto to our dataclasses and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from kvrelay.kv.hashing import HASH_BYTES
from kvrelay.kv.store_messages import (
    BlockReport,
    BlockSelection,
    DeleteReply,
    PutBegin,
    PutReply,
    StoreNamespace,
    StoreReport,
    TenantReport,
    TierReport,
    WorkReport,
)
from kvrelay.pb import kvstore_pb2
from kvrelay.rpc.convert_types import check, parse, tenant_from_pb
from kvrelay.types import BlockHash, Tier, check_tenant_name, check_ttl_s

MAX_HASHES = 65_536  # of one message
MAX_PIN_S = 604_800  # a week

_TIERS = {
    Tier.NONE: kvstore_pb2.TIER_NONE,
    Tier.MEMORY: kvstore_pb2.TIER_MEMORY,
    Tier.DISK: kvstore_pb2.TIER_DISK,
}
_TIERS_FROM_PB = {wire: tier for tier, wire in _TIERS.items()}


def tier_to_pb(tier: Tier) -> kvstore_pb2.Tier.ValueType:
    """A store's tiers; raises KeyError for DEVICE, which is no store's."""
    return _TIERS[tier]


def tier_from_pb(wire: kvstore_pb2.Tier.ValueType) -> Tier:
    check(wire in _TIERS_FROM_PB, f"tier {wire} is unknown")
    return _TIERS_FROM_PB[wire]


def hashes_from_pb(name: str, wire: Sequence[bytes]) -> list[BlockHash]:
    """At most 65,536 of 32 bytes each. Raises InvalidRequestError."""
    check(len(wire) <= MAX_HASHES, f"{name} has {len(wire)} entries; at most {MAX_HASHES} are allowed")
    for one in wire:
        check(len(one) == HASH_BYTES, f"{name} holds one of {len(one)} bytes; each has {HASH_BYTES}")
    return [BlockHash(one) for one in wire]


def store_namespace_to_pb(namespace: StoreNamespace) -> kvstore_pb2.StoreNamespace:
    return kvstore_pb2.StoreNamespace(**asdict(namespace))


def store_namespace_from_pb(wire: kvstore_pb2.StoreNamespace) -> StoreNamespace:
    """Fingerprints are for the store to check."""
    return StoreNamespace(wire.model_fingerprint, wire.layout_fingerprint)


def put_begin_to_bytes(begin: PutBegin) -> bytes:
    wire = kvstore_pb2.PutBegin(
        namespace=store_namespace_to_pb(begin.namespace),
        tenant=begin.tenant,
        ttl_s=begin.ttl_s,
        parent_hashes=begin.parent_hashes,
        chain_indexes=begin.chain_indexes,
    )
    return wire.SerializeToString()


def put_begin_from_bytes(payload: bytes | memoryview) -> PutBegin:
    wire = parse(kvstore_pb2.PutBegin, payload)
    parents, indexes = hashes_from_pb("parent_hashes", wire.parent_hashes), tuple(wire.chain_indexes)
    check(len(indexes) == len(parents), f"parent_hashes has {len(parents)} entries and chain_indexes {len(indexes)}")
    ttl_s = wire.ttl_s if wire.HasField("ttl_s") else None
    check_ttl_s("ttl_s", ttl_s)
    namespace = store_namespace_from_pb(wire.namespace)
    return PutBegin(namespace, tenant_from_pb(wire.tenant), ttl_s, tuple(parents), indexes)


def put_reply_to_bytes(reply: PutReply) -> bytes:
    return kvstore_pb2.PutReply(**asdict(reply)).SerializeToString()


def pin_s_from_pb(pin_s: float) -> float:
    """Raises InvalidRequestError unless it is from 0 to a week."""
    check(0 <= pin_s <= MAX_PIN_S, f"pin_s is {pin_s:g}; allowed is a number of seconds from 0 to {MAX_PIN_S}")
    return pin_s


def delete_request_to_pb(selection: BlockSelection) -> kvstore_pb2.DeleteRequest:
    return kvstore_pb2.DeleteRequest(**asdict(selection))


def delete_request_from_pb(wire: kvstore_pb2.DeleteRequest) -> BlockSelection:
    """Raises InvalidRequestError, also for one that selects nothing in particular."""
    unused_s = wire.unused_s if wire.HasField("unused_s") else None
    selection = BlockSelection(wire.tenant, wire.model_fingerprint, wire.block_hash, unused_s)
    check(
        selection != BlockSelection(),
        "a delete needs to say which blocks: set one of tenant, model_fingerprint, block_hash and unused_s",
    )
    if selection.tenant:
        check_tenant_name(selection.tenant)
    length = len(selection.block_hash)
    check(length in (0, HASH_BYTES), f"block_hash has {length} bytes; it has {HASH_BYTES}")
    check_ttl_s("unused_s", unused_s)
    return selection


def delete_reply_from_pb(wire: kvstore_pb2.DeleteReply) -> DeleteReply:
    return DeleteReply(wire.num_blocks, wire.num_bytes)


def store_report_to_pb(report: StoreReport) -> kvstore_pb2.StatsReply:
    return kvstore_pb2.StatsReply(
        memory=kvstore_pb2.TierStats(**asdict(report.memory)),
        disk=kvstore_pb2.TierStats(**asdict(report.disk)),
        misses=report.misses,
        corrupt=report.corrupt,
        write_failures=report.write_failures,
        expired=report.expired,
        num_pinned=report.num_pinned,
        file_bytes=report.file_bytes,
        tenants=[kvstore_pb2.TenantStats(**asdict(tenant)) for tenant in report.tenants],
    )


def store_report_from_pb(wire: kvstore_pb2.StatsReply) -> StoreReport:
    return StoreReport(
        memory=_tier_report_from_pb(wire.memory),
        disk=_tier_report_from_pb(wire.disk),
        misses=wire.misses,
        corrupt=wire.corrupt,
        write_failures=wire.write_failures,
        expired=wire.expired,
        num_pinned=wire.num_pinned,
        file_bytes=wire.file_bytes,
        tenants=tuple(
            TenantReport(one.tenant, one.memory_bytes, one.memory_quota_bytes, one.disk_bytes, one.disk_quota_bytes)
            for one in wire.tenants
        ),
    )


def list_reply_to_pb(blocks: Iterable[BlockReport]) -> kvstore_pb2.ListReply:
    return kvstore_pb2.ListReply(blocks=[_block_report_to_pb(block) for block in blocks])


def list_reply_from_pb(wire: kvstore_pb2.ListReply) -> list[BlockReport]:
    return [_block_report_from_pb(block) for block in wire.blocks]


def verify_reply_to_pb(work: WorkReport) -> kvstore_pb2.VerifyReply:
    return kvstore_pb2.VerifyReply(num_done=work.num_done, num_total=work.num_total, num_corrupt=work.num_corrupt)


def compact_reply_to_pb(work: WorkReport) -> kvstore_pb2.CompactReply:
    return kvstore_pb2.CompactReply(
        num_done=work.num_done, num_total=work.num_total, num_freed_bytes=work.num_freed_bytes
    )


def work_report_from_pb(wire: kvstore_pb2.VerifyReply | kvstore_pb2.CompactReply) -> WorkReport:
    if isinstance(wire, kvstore_pb2.VerifyReply):
        return WorkReport(wire.num_done, wire.num_total, num_corrupt=wire.num_corrupt)
    return WorkReport(wire.num_done, wire.num_total, num_freed_bytes=wire.num_freed_bytes)


def _tier_report_from_pb(wire: kvstore_pb2.TierStats) -> TierReport:
    return TierReport(wire.num_blocks, wire.num_bytes, wire.capacity_bytes, wire.hits, wire.evictions)


def _block_report_to_pb(block: BlockReport) -> kvstore_pb2.StoredBlockInfo:
    return kvstore_pb2.StoredBlockInfo(
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        chain_index=block.chain_index,
        namespace_key=block.namespace_key,
        tenant=block.tenant,
        tier=tier_to_pb(block.tier),
        num_bytes=block.num_bytes,
        unused_s=block.unused_s,
        expires_in_s=block.expires_in_s,
        pinned_s=block.pinned_s,
    )


def _block_report_from_pb(wire: kvstore_pb2.StoredBlockInfo) -> BlockReport:
    return BlockReport(
        block_hash=BlockHash(wire.block_hash),
        parent_hash=BlockHash(wire.parent_hash),
        chain_index=wire.chain_index,
        namespace_key=wire.namespace_key,
        tenant=wire.tenant,
        tier=tier_from_pb(wire.tier),
        num_bytes=wire.num_bytes,
        unused_s=wire.unused_s,
        expires_in_s=wire.expires_in_s if wire.HasField("expires_in_s") else None,
        pinned_s=wire.pinned_s,
    )
