"""What the store counts."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.listing import TenantHoldings


@dataclass(frozen=True, slots=True)
class TierHoldings:
    """Sizes are slab bytes in memory, whole records on disk."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the process started."""

    memory: TierHoldings
    disk: TierHoldings
    misses: int
    corrupt: int
    write_failures: int  # blocks that the disk did not take: full, failed, too slow
    refused: int = 0  # blocks for which quotas, pins or sizes left no room in a tier, or whose parent is not held
    not_worth: int = 0  # blocks that did not go to disk, because such blocks hardly ever are used again
    expired: int = 0
    num_pinned: int = 0
    file_bytes: int = 0
    disk_writing: bool = False  # false without a disk tier, and while the disk refuses
    wipes: int = 0  # times the disk tier started empty although there was something
    tenants: tuple[TenantHoldings, ...] = ()  # those that hold most first
