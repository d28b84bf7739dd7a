"""The books of the store's disk tier without a disk: what of the same chains its policy keeps."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.types import BlockHash
from kvstore import record
from kvstore.block import BlockInfo
from kvstore.index import TierIndex
from kvstore.quotas import Quotas

TENANT = "default"
NOW_S = 0.0  # nothing expires
ROOT = b"root"


class PolicyAlone:
    """`capacity_bytes` are of records, as of the disk tier."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self._index = TierIndex(capacity_bytes, Quotas())
        self._record_bytes = record.record_pages(slab_bytes) * record.PAGE_BYTES

    def ask(self, chain: Sequence[BlockHash]) -> int:
        """How many of its leading blocks are here; the others are, from now on."""
        num_found = next((place for place, key in enumerate(chain) if key not in self._index), len(chain))
        self._index.hit(chain[:num_found], NOW_S)
        for place in range(num_found, len(chain)):
            self._put(BlockInfo(chain[place], chain[place - 1] if place else ROOT, place, TENANT, 0.0))
        return num_found

    def _put(self, info: BlockInfo) -> None:
        if self._index.make_room(self._record_bytes, info.tenant, NOW_S, keep=(info.parent,)) is None:
            raise AssertionError("one block does not fit")
        self._index.add(info, self._record_bytes, NOW_S)
