"""Who owns each KV block of a node.

A block is in exactly one state: free, reserved (set aside by one reservation), held (by sequences and reservations
that share it, counted), or cached (full, hashed, unreferenced; least recently used first out). Bytes are none of
the pool's business. One owner, the engine thread; nothing here locks but `named`, which others may listen to.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.errors import DuplicateRequestError, NeverFitsError, NotFoundError, OverloadedError
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.types import BlockCounts, BlockHash, BlockId, ReservationId


class PoolCorruptError(AssertionError):
    """The pool's books do not add up, or a caller used a block it does not own: a bug, not a condition to handle."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """`block_ids` in order of the sequence: `num_cached` pinned ones that hold KV already, then fresh ones."""

    block_ids: list[BlockId]
    num_cached: int

    @property
    def pinned_ids(self) -> list[BlockId]:
        return self.block_ids[: self.num_cached]

    @property
    def fresh_ids(self) -> list[BlockId]:
        return self.block_ids[self.num_cached :]


class BlockPool:
    """`num_evictions` counts cached blocks that gave way to new ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._free: list[BlockId] = [BlockId(i) for i in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # oldest first
        self._ref_counts: dict[BlockId, int] = {}  # the held ones, all above 0
        self._reservations: dict[ReservationId, Reservation] = {}
        self._num_reserved = 0
        self._hashes: dict[BlockId, BlockHash] = {}
        self.named = NamedBlocks()  # the inverse of _hashes

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest prefix of `hashes` that is here. Changes nothing, not even their age."""
        block_ids: list[BlockId] = []
        for block_hash in hashes:
            block_id = self.named.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find(self, block_hash: BlockHash) -> BlockId | None:
        return self.named.find(block_hash)

    def reserve(
        self, reservation_id: ReservationId, prefix_hashes: Sequence[BlockHash], num_blocks: int
    ) -> Reservation:
        """Sets `num_blocks` aside for one request, the longest cached prefix among them.

        Pinned prefix blocks count as held, fresh ones as reserved. Raises, changing nothing, NeverFitsError if the
        pool is smaller than that, OverloadedError if there is no room now, DuplicateRequestError if the id is taken.
        """
        if reservation_id in self._reservations:
            raise DuplicateRequestError(f"reservation {reservation_id} exists")
        pinned = self.match(prefix_hashes[:num_blocks])
        self._check_room(num_blocks, pinned)
        self.acquire(pinned)
        fresh = [self._take() for _ in range(num_blocks - len(pinned))]
        self._num_reserved += len(fresh)
        reservation = Reservation(pinned + fresh, len(pinned))
        self._reservations[reservation_id] = reservation
        return reservation

    def commit(self, reservation_id: ReservationId) -> list[BlockId]:
        """Ends the reservation; its blocks, all returned, become held. Raises NotFoundError."""
        reservation = self._end(reservation_id)
        for block_id in reservation.fresh_ids:
            self._ref_counts[block_id] = 1
        return list(reservation.block_ids)

    def cancel(self, reservation_id: ReservationId) -> None:
        """Ends the reservation and gives back all it had. Raises NotFoundError."""
        reservation = self._end(reservation_id)
        self._free.extend(reversed(reservation.fresh_ids))
        self.release(reservation.pinned_ids)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Fresh blocks for a running sequence, held once. Raises OverloadedError, changing nothing."""
        self._check_room(num_blocks, ())
        block_ids = [self._take() for _ in range(num_blocks)]
        self._ref_counts.update(dict.fromkeys(block_ids, 1))
        return block_ids

    def may_write(self, block_id: BlockId) -> bool:
        """Whether the block is held once and has no name, so that nobody else reads what is in it."""
        return self._ref_counts.get(block_id, 0) == 1 and block_id not in self._hashes

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Holds once more what is held or cached."""
        for block_id in block_ids:
            ref_count = self._ref_counts.get(block_id, 0)
            if ref_count == 0 and block_id not in self._cached:
                raise PoolCorruptError(f"block {block_id} was acquired while neither held nor cached")
            self._cached.pop(block_id, None)
            self._ref_counts[block_id] = ref_count + 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Lets go once; what nobody holds then is cached if it has a hash, else free.

        `block_ids` go in order of the sequence: later blocks are evicted first, since they are of no use without
        the earlier ones. Raises PoolCorruptError, changing nothing, for a block that is not held that often.
        """
        for block_id, count in Counter(block_ids).items():
            if self._ref_counts.get(block_id, 0) < count:
                raise PoolCorruptError(f"block {block_id} was released {count} times, more than it is held")
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._let_go(block_id)

    def register(self, block_id: BlockId, block_hash: BlockHash) -> bool:
        """Names a held block whose contents are full and final, so that others may share it.

        The first block of a hash keeps it: False for a later one, which will simply be freed.
        """
        if block_id not in self._ref_counts:
            raise PoolCorruptError(f"block {block_id} was registered while not held")
        if self._hashes.get(block_id, block_hash) != block_hash:
            raise PoolCorruptError(f"block {block_id} was registered under a second hash")
        if self.named.claim(block_hash, block_id) != block_id:
            return False
        self._hashes[block_id] = block_hash
        return True

    def disown(self, block_ids: Iterable[BlockId]) -> None:
        """Forgets the names of blocks whose contents are in doubt: none is found again, whoever holds it now."""
        for block_id in block_ids:
            block_hash = self._hashes.pop(block_id, None)
            if block_hash is None:
                continue
            self.named.remove(block_hash)
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            reserved=self._num_reserved,
            held=len(self._ref_counts),
            cached=len(self._cached),
        )

    def check(self) -> None:
        """Proves that every block is in one state and every book agrees. Raises PoolCorruptError; O(num_blocks)."""
        reserved = [block_id for r in self._reservations.values() for block_id in r.fresh_ids]
        everywhere = [*self._free, *reserved, *self._ref_counts, *self._cached]
        pins = Counter(block_id for r in self._reservations.values() for block_id in r.pinned_ids)
        named_and_owned = self._ref_counts.keys() | self._cached.keys()
        _require(sorted(everywhere) == list(range(self.num_blocks)), "a block has no state, or two")
        _require(len(reserved) == self._num_reserved, "the count of reserved blocks is off")
        _require(all(count > 0 for count in self._ref_counts.values()), "a held block has no reference")
        _require(all(self._ref_counts.get(i, 0) >= n for i, n in pins.items()), "a pinned block is not held")
        _require({h: i for i, h in self._hashes.items()} == dict(self.named.items()), "hash index and blocks disagree")
        _require(self._hashes.keys() <= named_and_owned, "a free or reserved block has a hash")
        _require(self._cached.keys() <= self._hashes.keys(), "a cached block has no hash")

    def _check_room(self, num_blocks: int, pinned: Sequence[BlockId]) -> None:
        if num_blocks > self.num_blocks:
            raise NeverFitsError(f"{num_blocks} KV blocks are needed; this node has {self.num_blocks} in all")
        needed = num_blocks - len(pinned)
        available = len(self._free) + len(self._cached) - sum(block_id in self._cached for block_id in pinned)
        if needed > available:
            raise OverloadedError(f"{needed} more KV blocks are needed; {available} of {self.num_blocks} are available")

    def _take(self) -> BlockId:
        """A block without state, evicting the oldest cached one if none is free."""
        if self._free:
            return self._free.pop()
        block_id, _ = self._cached.popitem(last=False)
        self.named.remove(self._hashes.pop(block_id))
        self.num_evictions += 1
        return block_id

    def _let_go(self, block_id: BlockId) -> None:
        del self._ref_counts[block_id]
        if block_id in self._hashes:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def _end(self, reservation_id: ReservationId) -> Reservation:
        reservation = self._reservations.pop(reservation_id, None)
        if reservation is None:
            raise NotFoundError(f"reservation {reservation_id} does not exist or has ended")
        self._num_reserved -= len(reservation.fresh_ids)
        return reservation


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise PoolCorruptError(what)
