"""Several stores as one: where chains lie, what a dead store changes, and that nothing moves that need not."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.chain import GROUP_BLOCKS, Chain, ChainBlock, home_of
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.stores import Stores, ranking
from kvrelay.types import BlockHash, Tier


def hash_of(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(number.to_bytes(8, "big")).digest())


class MemoryStore:
    def __init__(self) -> None:
        self.slabs: dict[BlockHash, bytes] = {}
        self.is_blocked = False
        self.num_failures = self.num_corrupt = self.num_stalls = 0
        self.num_puts = 0

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        missing = next((i for i, block_hash in enumerate(hashes) if block_hash not in self.slabs), len(hashes))
        return [Tier.MEMORY] * missing

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        return [block_hash for block_hash in hashes if block_hash not in self.slabs]

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        for block_hash in hashes:
            if block_hash not in self.slabs:
                return
            yield block_hash, self.slabs[block_hash], Tier.MEMORY

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        self.num_puts += 1
        before = len(self.slabs)
        self.slabs |= dict(slabs)
        return len(self.slabs) - before

    def stalled(self, chain: Chain | None = None) -> None:
        self.num_stalls += 1

    async def close(self) -> None:
        self.slabs.clear()


NAMES = ("a:1", "b:1", "c:1")


def three(num_replicas: int = 1) -> tuple[Stores, dict[str, MemoryStore]]:
    members = {name: MemoryStore() for name in NAMES}
    return Stores(dict(members), num_replicas), members


def chain_of(number: int, num_blocks: int = 10) -> list[ChainBlock]:
    hashes = [hash_of(1_000 * number + index) for index in range(num_blocks)]
    chain = Chain(home_of(hashes))
    parents = [hash_of(10**9), *hashes]
    return [ChainBlock(block_hash, parents[index], index, chain) for index, block_hash in enumerate(hashes)]


def slab_of(block_hash: BlockHash) -> bytes:
    return b"slab" + block_hash


async def put(stores: Stores, blocks: Sequence[ChainBlock]) -> int:
    return await stores.put([(block.block_hash, slab_of(block.block_hash)) for block in blocks], blocks)


async def fetch(stores: Stores, blocks: Sequence[ChainBlock]) -> int:
    """How many came, every byte compared."""
    hashes = [block.block_hash for block in blocks]
    found = []
    async with aclosing(stores.get(hashes, blocks[0].chain)) as slabs:
        async for block_hash, slab, _ in slabs:
            assert slab == slab_of(block_hash)
            found.append(block_hash)
    assert found == hashes[: len(found)]
    return len(found)


@given(st.integers(0, 10_000), st.permutations(NAMES))
def test_every_node_ranks_the_stores_alike(number: int, names: list[str]) -> None:
    assert ranking(names, hash_of(number)) == ranking(NAMES, hash_of(number))


def test_the_ranking_is_the_same_in_every_release() -> None:
    assert [ranking(NAMES, hash_of(number))[0] for number in range(6)] == [
        *("a:1", "c:1", "b:1", "a:1", "a:1", "b:1"),
    ]


@given(st.integers(0, 10_000))
def test_a_store_that_joins_or_leaves_changes_nothing_between_the_others(number: int) -> None:
    with_d = ranking((*NAMES, "d:1"), hash_of(number))
    assert [name for name in with_d if name != "d:1"] == ranking(NAMES, hash_of(number))


def test_chains_are_shared_out_evenly() -> None:
    first = [ranking(NAMES, hash_of(number))[0] for number in range(3_000)]
    assert all(900 < first.count(name) < 1_100 for name in NAMES)


async def test_a_chain_lies_whole_in_one_store() -> None:
    stores, members = three()
    for number in range(20):
        assert await put(stores, chain_of(number)) == 10
        assert await fetch(stores, chain_of(number)) == 10
    for number in range(20):
        holders = [name for name in NAMES if chain_of(number)[0].block_hash in members[name].slabs]
        assert len(holders) == 1
        assert await members[holders[0]].match([block.block_hash for block in chain_of(number)]) == [Tier.MEMORY] * 10


async def test_two_replicas_outlive_the_death_of_either() -> None:
    stores, members = three(num_replicas=2)
    blocks = chain_of(1)
    await put(stores, blocks)
    holders = [member for member in members.values() if member.slabs]
    assert len(holders) == 2
    for dead in holders:
        dead.is_blocked = True
        assert await fetch(stores, blocks) == 10
        dead.is_blocked = False


async def test_what_one_replica_lacks_comes_from_the_other() -> None:
    stores, members = three(num_replicas=2)
    blocks = chain_of(1)
    await put(stores, blocks)
    first = members[ranking(NAMES, blocks[0].chain.home)[0]]
    del first.slabs[blocks[4].block_hash]
    assert await stores.match([block.block_hash for block in blocks], blocks[0].chain) == [Tier.MEMORY] * 10
    assert await fetch(stores, blocks) == 10
    assert await stores.missing([block.block_hash for block in blocks], blocks[0].chain) == [blocks[4].block_hash]


async def test_a_dead_store_hands_its_share_to_the_next_and_takes_it_back() -> None:
    stores, members = three()
    blocks = chain_of(1)
    first, second, _ = ranking(NAMES, blocks[0].chain.home)
    members[first].is_blocked = True
    assert await fetch(stores, blocks) == 0
    await put(stores, blocks)
    assert len(members[second].slabs) == 10
    assert await fetch(stores, blocks) == 10
    members[first].is_blocked = False
    assert await fetch(stores, blocks) == 0, "nothing was moved for it"
    assert await put(stores, blocks) == 10
    assert len(members[first].slabs) == 10


async def test_with_every_store_dead_everything_is_a_miss() -> None:
    stores, members = three()
    assert not stores.is_blocked
    for member in members.values():
        member.is_blocked = True
    blocks = chain_of(1)
    assert stores.is_blocked
    assert await put(stores, blocks) == 0
    assert await stores.match([block.block_hash for block in blocks], blocks[0].chain) == []
    assert await stores.missing([block.block_hash for block in blocks], blocks[0].chain) == []


async def test_failures_are_counted_together_and_a_stall_is_the_first_ones() -> None:
    stores, members = three(num_replicas=2)
    chain = chain_of(1)[0].chain
    stores.stalled(chain)
    assert [members[name].num_stalls for name in ranking(NAMES, chain.home)] == [1, 0, 0]
    members["a:1"].num_failures, members["b:1"].num_failures, members["c:1"].num_corrupt = 1, 2, 3
    assert (stores.num_failures, stores.num_corrupt) == (3, 3)


def test_chains_that_share_their_first_group_have_one_home() -> None:
    hashes = [hash_of(index) for index in range(20)]
    assert home_of(hashes) == home_of(hashes[:GROUP_BLOCKS]) == home_of([*hashes[:GROUP_BLOCKS], hash_of(99)])
    assert home_of(hashes[: GROUP_BLOCKS - 1]) == home_of(hashes[:1]) == hashes[0]
