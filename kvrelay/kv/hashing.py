"""Identity and integrity of blocks: SHA-256 chains name them, xxh3 checksums guard their bytes.

Hashes are the same in every process, on every machine and in every release: a store or a peer holds blocks under
them, and two processes that disagreed would never hit. The byte layout is in docs/wire.md; the golden vectors in
tests/unit/kv/test_hashing.py pin it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

from kvrelay.types import BlockHash

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous; collections.abc.Buffer needs Python 3.12

HASH_BYTES = 32
CHECKSUM_BYTES = 16
NO_HASH = BlockHash(bytes(HASH_BYTES))  # of a partial block, and of frames that carry none

_LENGTH = struct.Struct("<I")


def hash_fields(*fields: bytes) -> bytes:
    """SHA-256 over the fields, each after its length as u32: no two lists of fields share an input."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(_LENGTH.pack(len(field)))
        digest.update(field)
    return digest.digest()


def chain_root(model_fingerprint: str, layout_fingerprint: str, tenant_salt: bytes, adapter: str = "") -> BlockHash:
    """Parent of a prompt's first block. Whatever separates two KV caches of the same tokens enters here."""
    return BlockHash(
        hash_fields(
            b"kvrelay-v1", model_fingerprint.encode(), layout_fingerprint.encode(), tenant_salt, adapter.encode()
        )
    )


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of the full block that holds `token_ids` (each in [0, 2**32)) after the chain that ends in `parent`."""
    return BlockHash(hash_fields(parent, struct.pack(f"<{len(token_ids)}I", *token_ids)))


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """The chain of the full blocks of `token_ids`; a partial last block has no hash."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = block_hash(parent, token_ids[start : start + block_tokens])
        hashes.append(parent)
    return hashes


def slab_checksum(payload: Buffer) -> bytes:
    """xxh3_128 of the bytes, 16 bytes big-endian: finds accidents, not attackers (50 GB/s where SHA-256 has 1.5)."""
    return xxhash.xxh3_128_digest(payload)


class ChecksumChain:
    """xxh3_128 over the checksums of a stream's blocks in order: proves that none is missing, doubled or moved."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, checksum: bytes) -> None:
        self._state.update(checksum)

    def digest(self) -> bytes:
        return self._state.digest()
