"""What an administrator is told of the blocks held, and of long work on them."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import Tier
from kvstore.block import BlockInfo


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block; times are seconds from now."""

    info: BlockInfo
    tier: Tier  # the fastest that has it
    num_bytes: int  # of its slab
    unused_s: float  # since its last use
    expires_in_s: float | None  # unless it is used before; None: never
    pinned_s: float  # it stays for as long at least; 0: not pinned


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a verify (which counts blocks) or a compact (bytes written anew) has come; the last one tells the end."""

    num_done: int
    num_total: int
    num_corrupt: int = 0  # verify: of those done, failed their proof and were dropped
    num_freed_bytes: int = 0  # compact: what the file has become smaller by


@dataclass(frozen=True, slots=True)
class TenantHoldings:
    """What one tenant has in the store; a quota of 0 means that none is set."""

    tenant: str
    memory_bytes: int = 0
    memory_quota_bytes: int = 0
    disk_bytes: int = 0
    disk_quota_bytes: int = 0
