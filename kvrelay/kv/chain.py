"""What a store is told of a block beside its bytes: where it stands in its chain, whose it is, how long it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.types import DEFAULT_TENANT, BlockHash

GROUP_BLOCKS = 8  # chains that share fewer may lie in different stores, each with a copy of what they share


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks of one prompt, of which each builds on the one before.

    `home` is what several stores share chains out by; `ttl_s` counts from a block's last use (None: as the store does
    for the tenant; 0: no end).
    """

    home: BlockHash
    tenant: str = DEFAULT_TENANT
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """One full block: `parent` is the hash before it, or the chain's root when `index` is 0."""

    block_hash: BlockHash
    parent: BlockHash
    index: int
    chain: Chain


def home_of(hashes: Sequence[BlockHash]) -> BlockHash:
    """The hash that names the first group of a chain, of which `hashes` are the full blocks, at least one.

    A chain that has no whole group yet is named by its first block, so that it moves once, when the group is full.
    """
    return hashes[GROUP_BLOCKS - 1] if len(hashes) >= GROUP_BLOCKS else hashes[0]
