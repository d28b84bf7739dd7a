"""What the store tells an administrator, in the words of the wire."""

from __future__ import annotations

from dataclasses import asdict

from kvrelay.kv.store_messages import BlockReport, BlockSelection, StoreReport, TenantReport, TierReport, WorkReport
from kvrelay.types import BlockHash
from kvstore.block import NAMESPACE_BYTES, model_key
from kvstore.listing import HeldBlock, Progress
from kvstore.selector import Selector
from kvstore.stats import StoreStats

MAX_TENANTS = 100


def store_report(stats: StoreStats) -> StoreReport:
    return StoreReport(
        memory=TierReport(**asdict(stats.memory)),
        disk=TierReport(**asdict(stats.disk)),
        misses=stats.misses,
        corrupt=stats.corrupt,
        write_failures=stats.write_failures,
        expired=stats.expired,
        num_pinned=stats.num_pinned,
        file_bytes=stats.file_bytes,
        tenants=tuple(TenantReport(**asdict(tenant)) for tenant in stats.tenants[:MAX_TENANTS]),
    )


def block_report(held: HeldBlock) -> BlockReport:
    return BlockReport(
        block_hash=BlockHash(held.info.key[NAMESPACE_BYTES:]),
        parent_hash=BlockHash(held.info.parent[NAMESPACE_BYTES:]),
        chain_index=held.info.chain_index,
        namespace_key=held.info.key[:NAMESPACE_BYTES].hex(),
        tenant=held.info.tenant,
        tier=held.tier,
        num_bytes=held.num_bytes,
        unused_s=held.unused_s,
        expires_in_s=held.expires_in_s,
        pinned_s=held.pinned_s,
    )


def work_report(progress: Progress) -> WorkReport:
    return WorkReport(**asdict(progress))


def selector(selection: BlockSelection) -> Selector:
    """Raises InvalidRequestError for a fingerprint that is none."""
    return Selector(
        tenant=selection.tenant,
        namespace=model_prefix(selection.model_fingerprint),
        block_hash=selection.block_hash,
        unused_s=selection.unused_s,
    )


def model_prefix(model_fingerprint: str) -> bytes:
    """What the keys of a model's blocks begin with; nothing where none is named. Raises InvalidRequestError."""
    return model_key(model_fingerprint) if model_fingerprint else b""
