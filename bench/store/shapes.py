"""The blocks that are put and got, of the two shapes of bench.handoff."""

from __future__ import annotations

import os

from bench.handoff.shapes import LAYOUTS, num_blocks_of
from kvrelay.kv.hashing import hash_fields
from kvrelay.types import BlockHash

PREFIX_TOKENS = 2_000


def num_blocks(shape: str) -> int:
    """Of one chain: about 144 MiB, and of the 8B shape exactly a prefix of PREFIX_TOKENS."""
    return PREFIX_TOKENS // LAYOUTS[shape].block_tokens if shape == "8B" else num_blocks_of(shape)


def fresh_hashes(count: int) -> list[BlockHash]:
    """Of a chain that was never seen before."""
    seed = os.urandom(16)
    return [BlockHash(hash_fields(seed, index.to_bytes(4, "little"))) for index in range(count)]


def random_slab(num_bytes: int) -> bytes:
    return os.urandom(num_bytes)
