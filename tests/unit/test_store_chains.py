"""Blocks of a store seen as chains."""

from __future__ import annotations

from typing import Any

from kvrelay.kv.store_messages import BlockReport
from kvrelay.store_chains import StoredChain, chains
from kvrelay.types import Tier
from tests.support.store_blocks import hash_of


def block(number: int, parent: int, place: int, **changes: Any) -> BlockReport:
    given = {"tier": Tier.MEMORY, "unused_s": 10.0, "namespace_key": "ab", **changes}
    return BlockReport(hash_of(number), hash_of(parent), place, given["namespace_key"], "default", given["tier"], 100,
                       given["unused_s"], None, 0.0)  # fmt: skip


def test_a_chain_for_each_block_that_none_follows_the_last_used_first() -> None:
    """1 - 2 - 3 and 1 - 2 - 4: the two share their beginning, as prompts of one system text do."""
    three = block(3, 2, 2, unused_s=5.0)
    four = block(4, 2, 2, unused_s=1.0, tier=Tier.DISK)
    held = [three, block(2, 1, 1), four, block(1, 0, 0)]  # in no order, as a store lists them
    both = frozenset({Tier.MEMORY, Tier.DISK})
    assert chains(held) == [StoredChain(four, 3, 300, both), StoredChain(three, 3, 300, frozenset({Tier.MEMORY}))]


def test_what_follows_a_block_that_is_gone_is_a_chain_of_its_own() -> None:
    assert [(chain.last.block_hash, chain.num_blocks) for chain in chains([block(3, 2, 2), block(4, 3, 3)])] == [
        (hash_of(4), 2)
    ]


def test_chains_of_two_models_are_two_even_where_their_hashes_are_equal() -> None:
    assert len(chains([block(1, 0, 0), block(1, 0, 0, namespace_key="cd")])) == 2


def test_no_blocks_no_chains() -> None:
    assert chains([]) == []
