"""Blocks of a store seen as chains: a prompt's prefix is a chain, and what people mean when they speak of an entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.kv.store_messages import BlockReport
from kvrelay.types import Tier


@dataclass(frozen=True, slots=True)
class StoredChain:
    """A block that none follows, and all that it follows; those may be part of other chains too."""

    last: BlockReport
    num_blocks: int
    num_bytes: int
    tiers: frozenset[Tier]


def chains(blocks: Iterable[BlockReport]) -> list[StoredChain]:
    """The chains of these blocks, the one last used first. A chain whose beginning is missing starts where it can."""
    found: dict[tuple[str, bytes], StoredChain] = {}
    for block in sorted(blocks, key=lambda block: block.chain_index):
        before = found.get((block.namespace_key, block.parent_hash))
        found[block.namespace_key, block.block_hash] = StoredChain(
            last=block,
            num_blocks=1 + (before.num_blocks if before else 0),
            num_bytes=block.num_bytes + (before.num_bytes if before else 0),
            tiers=frozenset({block.tier}) | (before.tiers if before else frozenset()),
        )
    followed = {(chain.last.namespace_key, chain.last.parent_hash) for chain in found.values()}
    return sorted((chain for name, chain in found.items() if name not in followed), key=_age)


def _age(chain: StoredChain) -> tuple[float, bytes]:
    return chain.last.unused_s, chain.last.block_hash
