import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptBlockError, InvalidRequestError
from kvrelay.kv.hashing import slab_checksum
from kvstore import record
from kvstore.block import StoredBlock, model_key, namespace_key
from tests.support.store_blocks import block_of, key_of


def read(key: bytes, value: bytes) -> StoredBlock:
    block = record.unpack(key, memoryview(value))
    block.verify()
    return block


@given(st.binary(max_size=9_000))
def test_round_trip(slab: bytes) -> None:
    value = record.pack(key_of(1), StoredBlock(slab, slab_checksum(slab)))
    assert read(key_of(1), value).payload == slab
    assert len(value) == record.record_bytes(len(slab))


def test_a_record_is_a_golden_value() -> None:
    """Stores hold blocks under this layout: a release that changes it reads none of an earlier one's."""
    value = record.pack(bytes(range(48)), StoredBlock(b"slab", b"16 bytes of xxh3"))
    header = "4b565242010000000400000000000000" + bytes(range(48)).hex() + b"16 bytes of xxh3".hex()
    assert value.hex().startswith(header + b"slab".hex())
    assert value[84:] == bytes(4080 - 84)


@pytest.mark.parametrize(("slab_bytes", "pages"), [(0, 1), (4_000, 1), (4_001, 2), (368_640, 91)])
def test_a_record_fills_whole_pages(slab_bytes: int, pages: int) -> None:
    """80 bytes of header and LMDB's 16: a value of k * 4096 - 16 bytes takes k pages, one byte more takes k + 1."""
    assert record.record_bytes(slab_bytes) == pages * 4096 - 16


@given(st.data())
def test_a_flipped_bit_is_found_unless_it_is_padding(data: st.DataObject) -> None:
    value = bytearray(record.pack(key_of(1), block_of(1, 500)))
    value[data.draw(st.integers(0, 80 + 500 - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBlockError):
        read(key_of(1), bytes(value))


@given(st.integers(0, 4_079))
def test_a_truncated_record_is_found(length: int) -> None:
    with pytest.raises(CorruptBlockError):
        read(key_of(1), record.pack(key_of(1), block_of(1, 500))[:length])


def test_a_record_under_another_key_is_found() -> None:
    with pytest.raises(CorruptBlockError, match="belongs to another key"):
        read(key_of(2), record.pack(key_of(1), block_of(1)))


def test_namespaces_differ_by_model_and_by_layout() -> None:
    """8 bytes each of SHA-256 over length-prefixed fields: b"kvrelay-store-model-v1" and the model, and likewise."""
    assert namespace_key("ab", "cd").hex() == "f092aa89951e4acba08fcbfc866bb970"
    assert namespace_key("a", "b") != namespace_key("b", "a")


def test_the_namespaces_of_a_model_begin_with_its_key() -> None:
    assert namespace_key("ab", "cd")[:8] == namespace_key("ab", "ef")[:8] == model_key("ab") != model_key("cd")


@pytest.mark.parametrize("fingerprint", ["", "f" * 129])
def test_a_namespace_without_a_fingerprint_is_refused(fingerprint: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"model_fingerprint has {len(fingerprint)} characters"):
        namespace_key(fingerprint, "l")
