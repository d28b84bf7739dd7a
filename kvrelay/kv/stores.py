"""Several stores as one: each chain has its place among them, found by rendezvous hashing, and nobody keeps a list.

Every node ranks the stores for a chain alike, by the hash of store and chain. A chain lies in the first ones of those
that are not left alone by their circuits. So a store that joins takes over its share of chains as they are offered
again, one that leaves or dies hands its share to the next in rank, and nothing is moved for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.hashing import Buffer, hash_fields
from kvrelay.types import BlockHash, Tier

NO_CHAIN = Chain(BlockHash(bytes(32)))


class Stores:
    """A `kvrelay.kv.block_store.BlockStore` over others, by their names, which are the same on every node.

    `num_replicas` stores have each chain. Writing goes to all of them, reading to the first, and on to the next for
    what it does not give.
    """

    def __init__(self, stores: dict[str, BlockStore], num_replicas: int = 1) -> None:
        self._stores = stores
        self._num_replicas = num_replicas

    @property
    def num_failures(self) -> int:
        return sum(store.num_failures for store in self._stores.values())

    @property
    def num_corrupt(self) -> int:
        return sum(store.num_corrupt for store in self._stores.values())

    @property
    def is_blocked(self) -> bool:
        return all(store.is_blocked for store in self._stores.values())

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        longest: list[Tier] = []
        for store in self._places(chain):
            tiers = await store.match(hashes, chain)
            longest = max(longest, tiers, key=len)
            if len(longest) == len(hashes):
                break
        return longest

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        """What one of the chain's places lacks is missing."""
        missing: set[BlockHash] = set()
        for store in self._places(chain):
            missing.update(await store.missing(hashes, chain))
        return [block_hash for block_hash in hashes if block_hash in missing]

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        num_given = 0
        for store in self._places(chain):
            async with aclosing(store.get(hashes[num_given:], chain)) as slabs:
                async for found in slabs:
                    num_given += 1
                    yield found
            if num_given == len(hashes):
                return

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        """How many were new to one store at least, as far as that is known: the most that one of them took."""
        stores = self._places(places[0].chain if places else None)
        return max([await store.put(slabs, places) for store in stores], default=0)

    def stalled(self, chain: Chain | None = None) -> None:
        for store in self._places(chain)[:1]:
            store.stalled(chain)

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()

    def _places(self, chain: Chain | None) -> list[BlockStore]:
        home = (chain or NO_CHAIN).home
        ranked = [self._stores[name] for name in ranking(list(self._stores), home)]
        return [store for store in ranked if not store.is_blocked][: self._num_replicas]


def ranking(names: Sequence[str], home: BlockHash) -> list[str]:
    """The stores in order of how they are preferred for a chain: the same list whoever asks, in whatever order."""
    return sorted(names, key=lambda name: hash_fields(b"kvrelay-rendezvous-v1", name.encode(), home), reverse=True)
