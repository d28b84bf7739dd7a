"""Blocks for tests of the store: bytes that follow from a number, so that a wrong block is seen."""

from __future__ import annotations

import hashlib

from kvrelay.kv.hashing import slab_checksum
from kvrelay.types import BlockHash
from kvstore.block import StoredBlock, namespace_key

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
