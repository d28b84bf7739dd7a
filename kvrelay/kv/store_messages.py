"""What crosses between a kvstore and its clients, one class per message of kvstore.proto. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import DEFAULT_TENANT, BlockHash, Tier


@dataclass(frozen=True, slots=True)
class StoreNamespace:
    """Blocks of one model in one layout; both fingerprints in hex."""

    model_fingerprint: str
    layout_fingerprint: str


@dataclass(frozen=True, slots=True)
class PutBegin:
    """What a Put stream says of the blocks that follow. Of each its parent (the chain's root for a first block) and its
    place in its chain; of none where the sender does not know of chains."""

    namespace: StoreNamespace
    tenant: str = DEFAULT_TENANT
    ttl_s: float | None = None  # None: the store's default for the tenant; 0: no end but eviction
    parent_hashes: tuple[BlockHash, ...] = ()
    chain_indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PutReply:
    """Blocks that were new to the store, that it had, and that it refused (checksum, size, no space, no parent)."""

    num_stored: int
    num_present: int
    num_refused: int


@dataclass(frozen=True, slots=True)
class TierReport:
    """Sizes are slab bytes in memory, whole records on disk; hits and evictions are blocks since start."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What one tenant has in the store; a quota of 0 means that it has no bound of its own."""

    tenant: str
    memory_bytes: int = 0
    memory_quota_bytes: int = 0
    disk_bytes: int = 0
    disk_quota_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Counts since the process started; `tenants` are those that hold most, that one first."""

    memory: TierReport = TierReport()
    disk: TierReport = TierReport()
    misses: int = 0
    corrupt: int = 0
    write_failures: int = 0
    expired: int = 0
    num_pinned: int = 0
    file_bytes: int = 0
    tenants: tuple[TenantReport, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block that is held."""

    block_hash: BlockHash
    parent_hash: BlockHash  # the chain's root for a first block
    chain_index: int  # 0 for a first block
    namespace_key: str  # hex; stands for model and layout
    tenant: str
    tier: Tier  # the fastest that has it
    num_bytes: int  # of its slab
    unused_s: float
    expires_in_s: float | None  # unless it is used; None: never
    pinned_s: float  # it stays for as long at least; 0: not pinned


@dataclass(frozen=True, slots=True)
class WorkReport:
    """How far a verify (which counts blocks) or a compact has come; the last one of a stream tells the end."""

    num_done: int
    num_total: int
    num_corrupt: int = 0  # verify: failed their proof and were dropped
    num_freed_bytes: int = 0  # compact: what the file is smaller by


@dataclass(frozen=True, slots=True)
class DeleteReply:
    """What was dropped: blocks, each once, and their slab bytes."""

    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """Which blocks a delete means: those that match every field that is set. At least one must be."""

    tenant: str = ""
    model_fingerprint: str = ""  # hex; in whatever layout
    block_hash: bytes = b""  # this block and all that follow it
    unused_s: float | None = None  # not used for longer than this
