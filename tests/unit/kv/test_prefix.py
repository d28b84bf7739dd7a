"""Loading a prefix from the kvstore: what comes right is used, the rest is left to compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from kvrelay.errors import CorruptBlockError, KVRelayError, UnavailableError
from kvrelay.kv.chain import Chain
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.prefix import count_cached, load_prefix
from kvrelay.types import BlockHash, BlockId, CachedTokens, Tier

HASHES = [BlockHash(bytes([i]) * 32) for i in range(1, 5)]
CHAIN = Chain(HASHES[0], "acme", 60.0)
BLOCK_IDS = [BlockId(i) for i in (7, 3, 9, 1)]


class FakeStore:
    def __init__(self, replies: Sequence[tuple[BlockHash, bytes, Tier]], error: KVRelayError | None = None) -> None:
        self.replies, self.error = replies, error
        self.hangs = False
        self.closed = False

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        assert chain == CHAIN
        try:
            for reply in self.replies:
                yield reply
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.closed = True


class FakeCache:
    def __init__(self) -> None:
        self.written: dict[BlockId, Buffer] = {}

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None:
        if payload == b"short":
            raise CorruptBlockError("a slab of 5 bytes")
        self.written[block_id] = payload


def replies(count: int, tier: Tier = Tier.MEMORY) -> list[tuple[BlockHash, bytes, Tier]]:
    return [(HASHES[i], b"slab %d" % i, tier) for i in range(count)]


async def load(store: FakeStore, limit_s: float = 30.0) -> tuple[list[Tier], dict[BlockId, Buffer]]:
    cache = FakeCache()
    tiers = await load_prefix(store, CHAIN, HASHES, BLOCK_IDS, cache.write_slab, limit_s)
    assert store.closed
    return tiers, cache.written


async def test_a_full_hit_fills_every_block_in_order() -> None:
    tiers, written = await load(FakeStore([*replies(2), *replies(4, Tier.DISK)[2:]]))
    assert tiers == [Tier.MEMORY, Tier.MEMORY, Tier.DISK, Tier.DISK]
    assert written == {7: b"slab 0", 3: b"slab 1", 9: b"slab 2", 1: b"slab 3"}


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_short_load_counts_what_came(count: int) -> None:
    tiers, written = await load(FakeStore(replies(count)))
    assert len(tiers) == len(written) == count


async def test_a_store_that_fails_midway_leaves_the_rest_to_compute() -> None:
    tiers, _ = await load(FakeStore(replies(2), UnavailableError("the store is gone")))
    assert tiers == [Tier.MEMORY] * 2


async def test_a_store_that_hangs_keeps_what_it_gave_and_no_longer_than_the_limit() -> None:
    store = FakeStore(replies(2))
    store.hangs = True
    tiers, _ = await load(store, limit_s=0.5)
    assert tiers == [Tier.MEMORY] * 2


async def test_a_slab_of_the_wrong_size_ends_the_load_before_it() -> None:
    tiers, written = await load(FakeStore([*replies(1), (HASHES[1], b"short", Tier.MEMORY), *replies(3)[2:]]))
    assert tiers == [Tier.MEMORY]
    assert list(written) == [7]


async def test_a_block_out_of_order_ends_the_load_before_it() -> None:
    tiers, _ = await load(FakeStore([*replies(1), *replies(3)[2:]]))
    assert tiers == [Tier.MEMORY]


async def test_more_than_was_asked_for_is_ignored() -> None:
    tiers, written = await load(FakeStore([*replies(4), (HASHES[0], b"again", Tier.DISK)]))
    assert tiers == [Tier.MEMORY] * 4
    assert written[BlockId(7)] == b"slab 0"


def test_cached_tokens_are_counted_by_tier() -> None:
    tiers = [Tier.MEMORY, Tier.DISK, Tier.MEMORY]
    assert count_cached(2, tiers, 16) == CachedTokens(device=32, memory=32, disk=16)
