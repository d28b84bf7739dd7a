"""What a store is told besides its tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.clock import seconds_since_boot
from kvstore.lifetimes import Lifetimes
from kvstore.placement import WritePolicy
from kvstore.quotas import Quotas


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The defaults are those of a store that a test opens; a process gets its from KVStoreConfig."""

    write_policy: WritePolicy = WritePolicy.THROUGH
    reuse_hits: int = 1  # REUSE: times a block was served before it is written
    min_reuse: float = 0.0  # places in a chain that are used again less often, as a share, do not go to disk
    disk_quotas: Quotas = field(default_factory=Quotas)
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    namespace_ttl_s: float = 0.0  # 0: blocks of models that nobody runs any more stay as long as others
    wall: Callable[[], float] = time.time
    since_boot: Callable[[], float] = seconds_since_boot
