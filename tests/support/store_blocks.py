"""Blocks for tests of the store: bytes that follow from a number, so that a wrong block is seen."""

from __future__ import annotations

import hashlib

from kvrelay.kv.hashing import slab_checksum
from kvrelay.types import BlockHash
from kvstore.block import DEFAULT_TENANT, BlockInfo, StoredBlock, namespace_key

NAMESPACE = namespace_key("m" * 64, "l" * 64)
SLAB_BYTES = 8_000


def hash_of(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(number.to_bytes(8, "big")).digest())


def key_of(number: int, namespace: bytes = NAMESPACE) -> bytes:
    return namespace + hash_of(number)


def slab_of(number: int, num_bytes: int = SLAB_BYTES) -> bytes:
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(num_bytes)


def block_of(number: int, num_bytes: int = SLAB_BYTES) -> StoredBlock:
    slab = slab_of(number, num_bytes)
    return StoredBlock(slab, slab_checksum(slab))


def info_of(
    number: int, after: int | None = None, index: int = 0, *, tenant: str = DEFAULT_TENANT, ttl_s: float = 0.0
) -> BlockInfo:
    """A block alone, or the one that follows block `after`."""
    parent = NAMESPACE + bytes(32) if after is None else key_of(after)
    return BlockInfo(key_of(number), parent, index, tenant, ttl_s)


def chain_of(*numbers: int, tenant: str = DEFAULT_TENANT, ttl_s: float = 0.0) -> list[BlockInfo]:
    """Blocks that follow each other, the first from a root."""
    befores = [None, *numbers]
    return [
        info_of(number, before, index, tenant=tenant, ttl_s=ttl_s)
        for index, (number, before) in enumerate(zip(numbers, befores, strict=False))
    ]
