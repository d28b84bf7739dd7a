"""Golden vectors: the expected values were computed from the documented byte layout with hashlib alone.

H(f1, f2, ...) = SHA-256 of, for each field, its length as u32 little-endian and then its bytes.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.hashing import ChecksumChain, block_hash, block_hashes, chain_root, hash_fields, slab_checksum
from kvrelay.types import BlockHash

MODEL = "ab" * 32
LAYOUT = "cd" * 32
ROOT = bytes.fromhex("8b7d434ba03815c04d13add07a8afd9406836bcda9b9e3ed118cf9f1ed3f00b1")
FIRST = bytes.fromhex("155ee4af91e938e2d2fa4e62e78f8c6b7b0cc3bb5fa949a3f703469b615d493d")
SECOND = bytes.fromhex("9c0eb96d88f88209c7003e3db2e19a6c9b616f1773a4717f8aef4cdebd750385")


@pytest.mark.parametrize(
    ("salt", "adapter", "expected"),
    [
        (b"", "", ROOT.hex()),
        (b"tenant-7", "", "9bd844b4e27f31aff19610c7732ed3a49cf4e308302f4318388932b7ea59e5f5"),
        (b"", "lora-1", "2d3dc4887b5f27ba53c5dd032b4d56d261e7d01be77aa8a1e55082da7780152d"),
    ],
)
def test_chain_root_is_golden(salt: bytes, adapter: str, expected: str) -> None:
    """H(b"kvrelay-v1", model fingerprint, layout fingerprint, salt, adapter), text as UTF-8."""
    assert chain_root(MODEL, LAYOUT, salt, adapter).hex() == expected


def test_block_hashes_are_golden_and_skip_the_partial_block() -> None:
    """H(parent, token ids as u32 little-endian), block after block."""
    token_ids = [1, 2, 3, 4294967295, 49151, 0, 17, 65536, 5, 5, 5]
    assert block_hashes(BlockHash(ROOT), token_ids, 4) == [FIRST, SECOND]
    assert block_hash(BlockHash(FIRST), (49151, 0, 17, 65536)) == SECOND


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(block_hashes(BlockHash(ROOT), range(num_tokens), 16)) == num_hashes


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9))
def test_a_longer_prompt_extends_the_chain(token_ids: list[int], block_tokens: int) -> None:
    whole = block_hashes(BlockHash(ROOT), token_ids, block_tokens)
    cut = block_hashes(BlockHash(ROOT), token_ids[: len(token_ids) // 2], block_tokens)
    assert whole[: len(cut)] == cut


@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
def test_different_fields_never_share_an_input(left: list[bytes], right: list[bytes]) -> None:
    assert (hash_fields(*left) == hash_fields(*right)) == (left == right)


def test_slab_checksum_is_xxh3_128() -> None:
    """Published vectors of XXH3 with seed 0."""
    assert slab_checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert slab_checksum(memoryview(b"abc")).hex() == "06b05ab6733a618578af5f94892f3950"


def test_checksum_chain_hashes_the_checksums_in_order() -> None:
    parts = [b"a" * 16, b"b" * 16, b"c" * 16]
    chain = ChecksumChain()
    for part in parts:
        chain.add(part)
    assert chain.digest() == slab_checksum(b"".join(parts))
    assert chain.digest() != slab_checksum(b"".join(reversed(parts)))
