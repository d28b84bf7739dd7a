import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequestError
from kvrelay.kv.layout import KVLayout

DEMO = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=16)


def test_sizes_of_the_demo_model() -> None:
    """SmolLM2-135M in bfloat16: 23,040 bytes a token."""
    assert DEMO.slab_shape == (30, 2, 16, 3, 64)
    assert DEMO.token_bytes == 23_040
    assert DEMO.slab_bytes == 368_640
    assert dataclasses.replace(DEMO, dtype="float32").slab_bytes == 737_280


def test_fingerprint_is_golden() -> None:
    """H(b"kvrelay-layout-v1", axes, dtype, layers, kv heads, head dim, block tokens), counts in decimal."""
    assert DEMO.fingerprint == "cc10d1e9da23e918c0638863716f2b2ee73bd4fc0a32ce408bed8c47c9edaaff"


@pytest.mark.parametrize(
    "change", [{"num_layers": 29}, {"num_kv_heads": 4}, {"head_dim": 65}, {"dtype": "float16"}, {"block_tokens": 32}]
)
def test_every_field_changes_the_fingerprint(change: dict[str, int]) -> None:
    assert dataclasses.replace(DEMO, **change).fingerprint != DEMO.fingerprint


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert DEMO.blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, "00 00 00 00"),
        (1, "01 00 03 00"),
        (2, "01 02 03 04"),
    ],
)
def test_what_follows_a_partial_blocks_tokens_is_zeroed_in_every_plane(num_tokens: int, expected: str) -> None:
    """One layer of K and V, two positions of one head with one dim of 4 bytes."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_tokens=2)
    slab = b"".join(bytes([i]) * 4 for i in (1, 2, 3, 4))
    cleared = layout.without_rest(slab, num_tokens)
    assert bytes(cleared) == b"".join(bytes([value]) * 4 for value in bytes.fromhex(expected))
    assert slab[4] == 2, "a copy"


@given(
    st.builds(
        KVLayout,
        num_layers=st.integers(1, 3),
        num_kv_heads=st.integers(1, 2),
        head_dim=st.integers(1, 3),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        block_tokens=st.integers(1, 5),
    ),
    st.data(),
)
def test_parts_have_the_same_zeros_as_the_slab_wherever_it_is_cut(layout: KVLayout, data: st.DataObject) -> None:
    """Not one byte of an earlier owner is in any part."""
    num_tokens = data.draw(st.integers(0, layout.block_tokens))
    slab = bytes(1 + i % 255 for i in range(layout.slab_bytes))
    row_bytes = layout.token_bytes // (2 * layout.num_layers)
    expected = bytes(byte if i // row_bytes % layout.block_tokens < num_tokens else 0 for i, byte in enumerate(slab))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(slab) - 1), max_size=4)))
    bounds = list(zip([0, *cuts], [*cuts, len(slab)], strict=True))
    parts = [layout.without_rest(slab[start:end], num_tokens, start) for start, end in bounds]
    assert [len(part) for part in parts] == [end - start for start, end in bounds]
    assert b"".join(parts) == bytes(layout.without_rest(slab, num_tokens)) == expected


@pytest.mark.parametrize(
    ("change", "message"), [({"head_dim": 0}, "head_dim is 0"), ({"dtype": "int8"}, "allowed are float32, bfloat16")]
)
def test_a_bad_layout_is_refused_by_name(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        dataclasses.replace(DEMO, **change)
