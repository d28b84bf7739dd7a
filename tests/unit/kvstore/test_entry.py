import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptBlockError
from kvstore import entry
from kvstore.block import BlockInfo
from kvstore.entry import Entry
from tests.support.store_blocks import info_of, key_of

ENTRY = Entry(info_of(2, after=1, index=7, tenant="tenant é", ttl_s=300.0), 8_000, 12.5, 3, 99.0)


@given(st.text(max_size=64), st.integers(0, 2**32 - 1), st.floats(0, 1e9), st.integers(0, 2**40), st.floats(0, 1e9))
def test_round_trip(tenant: str, chain_index: int, ttl_s: float, slab_bytes: int, last_used_s: float) -> None:
    info = BlockInfo(key_of(2), key_of(1), chain_index, tenant, ttl_s)
    one = Entry(info, slab_bytes, last_used_s, hits=5, pinned_until_s=1.5)
    try:
        tenant.encode()
    except UnicodeEncodeError:  # lone surrogates: no name that came over the wire has any
        return
    assert entry.unpack(key_of(2), entry.pack(one)) == one


@given(st.data())
def test_a_flipped_bit_is_found(data: st.DataObject) -> None:
    value = bytearray(entry.pack(ENTRY))
    value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBlockError):
        entry.unpack(key_of(2), bytes(value))


@pytest.mark.parametrize("length", [0, 5, 8, 60])
def test_a_truncated_entry_is_found(length: int) -> None:
    with pytest.raises(CorruptBlockError):
        entry.unpack(key_of(2), entry.pack(ENTRY)[:length])


def test_an_entry_under_another_key_is_found() -> None:
    with pytest.raises(CorruptBlockError):
        entry.unpack(key_of(3), entry.pack(ENTRY))
