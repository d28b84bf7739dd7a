from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_tokens=4)


def numbered_cache() -> PagedKVCache:
    """Three blocks whose 96 numbers are 0, 1, 2 ... in memory order."""
    cache = PagedKVCache(LAYOUT, 3)
    cache.tensor.copy_(torch.arange(96, dtype=torch.float32).view(cache.tensor.shape))
    return cache


def test_cache_starts_as_zeros_in_block_major_order() -> None:
    cache = PagedKVCache(LAYOUT, 3)
    assert cache.tensor.shape == (3, 2, 2, 4, 1, 2)
    assert cache.tensor.is_contiguous()
    assert not cache.tensor.any()


def test_keys_and_values_are_views_of_one_layer() -> None:
    cache = numbered_cache()
    assert cache.keys(0).shape == (3 + 1, 4, 1, 2)  # the scratch block lies behind
    assert cache.keys(0)[1].flatten().tolist() == [32, 33, 34, 35, 36, 37, 38, 39]
    assert cache.values(1)[2].flatten().tolist() == [88, 89, 90, 91, 92, 93, 94, 95]
    cache.keys(1)[0, 0, 0, 0] = -1
    assert cache.tensor[0, 1, 0, 0, 0, 0] == -1


def test_slab_is_the_blocks_own_memory_in_little_endian() -> None:
    assert numbered_cache().read_slab(BlockId(1)) == struct.pack("<32f", *range(32, 64))


def test_slab_read_is_a_copy() -> None:
    cache = numbered_cache()
    slab = cache.read_slab(BlockId(0))
    cache.tensor.zero_()
    assert slab == struct.pack("<32f", *range(32))


def test_slabs_viewed_are_the_blocks_own_memory_and_may_not_be_written_to() -> None:
    cache = numbered_cache()
    views = cache.view_slabs([BlockId(2), BlockId(0)])
    assert views == [struct.pack("<32f", *range(64, 96)), struct.pack("<32f", *range(32))]
    cache.tensor[0].zero_()
    assert views[1] == bytes(128)
    assert all(memoryview(view).readonly for view in views)
    assert cache.view_slabs([]) == []


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_slab_written_fills_its_block_and_no_other(kind: type) -> None:
    cache = numbered_cache()
    cache.write_slab(BlockId(1), kind(struct.pack("<32f", *range(100, 132))))
    assert cache.tensor.flatten().tolist() == [*range(32), *range(100, 132), *range(64, 96)]


@pytest.mark.parametrize("num_bytes", [0, 127, 129, 256])
def test_slab_of_another_length_is_refused_and_changes_nothing(num_bytes: int) -> None:
    cache = numbered_cache()
    with pytest.raises(CorruptBlockError, match=f"a slab of {num_bytes} bytes; this layout's have 128"):
        cache.write_slab(BlockId(1), bytes(num_bytes))
    assert cache.tensor.flatten().tolist() == list(range(96))


def test_a_part_of_a_slab_is_viewed_and_written_where_it_lies() -> None:
    cache = numbered_cache()
    assert cache.view_slabs([BlockId(2), BlockId(0)], 8, 16) == [struct.pack("<2f", 66, 67), struct.pack("<2f", 2, 3)]
    cache.write_part(BlockId(1), struct.pack("<3f", 100, 101, 102), 29 * 4)
    assert cache.tensor.flatten().tolist() == [*range(61), 100, 101, 102, *range(64, 96)]


@pytest.mark.parametrize(("offset_bytes", "num_bytes"), [(1, 128), (0, 129), (127, 2), (128, 1), (-1, 1), (-4, 4)])
def test_a_part_that_reaches_into_another_block_is_refused_and_changes_nothing(
    offset_bytes: int, num_bytes: int
) -> None:
    cache = numbered_cache()
    message = f"{num_bytes} bytes from byte {offset_bytes} of a slab; this layout's have 128"
    with pytest.raises(CorruptBlockError, match=message):
        cache.write_part(BlockId(1), bytes(num_bytes), offset_bytes)
    assert cache.tensor.flatten().tolist() == list(range(96))


@given(st.sets(st.integers(1, 127), max_size=6).map(sorted))
def test_a_slab_written_in_parts_is_the_slab(cuts: list[int]) -> None:
    source, target = numbered_cache(), PagedKVCache(LAYOUT, 3)
    for start, end in zip([0, *cuts], [*cuts, 128], strict=True):
        (part,) = source.view_slabs([BlockId(1)], start, end)
        target.write_part(BlockId(2), part, start)
    assert target.tensor.flatten().tolist() == [*[0] * 64, *range(32, 64)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_slab_moves_between_caches_bit_for_bit(dtype: str) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype=dtype, block_tokens=8)
    source, target = PagedKVCache(layout, 2), PagedKVCache(layout, 4)
    source.tensor.normal_(generator=torch.Generator().manual_seed(1))
    slab = source.read_slab(BlockId(1))
    assert len(slab) == layout.slab_bytes
    target.write_slab(BlockId(3), slab)
    assert torch.equal(target.tensor[3], source.tensor[1])
    assert not target.tensor[:3].any()


def test_store_puts_each_token_at_its_slot() -> None:
    cache = PagedKVCache(LAYOUT, 3)
    rows = cache.rows_of(torch.tensor([2 * 4 + 3, 0 * 4 + 1]))  # block 2 offset 3, then block 0 offset 1
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    cache.store(1, rows, k, k + 10)
    assert cache.keys(1)[2, 3, 0].tolist() == [1, 2]
    assert cache.keys(1)[0, 1, 0].tolist() == [3, 4]
    assert cache.values(1)[2, 3, 0].tolist() == [11, 12]
    assert cache.values(1)[0, 1, 0].tolist() == [13, 14]
    assert cache.tensor.count_nonzero() == 8


def test_the_scratch_block_is_no_block_of_the_pool() -> None:
    cache = numbered_cache()
    assert cache.scratch_block == 3
    rows = cache.rows_of(torch.tensor([cache.scratch_block * 4]))
    cache.store(1, rows, torch.full((1, 1, 2), -1.0), torch.full((1, 1, 2), -2.0))
    assert cache.tensor.flatten().tolist() == list(range(96))
    assert cache.keys(1)[3, 0, 0].tolist() == [-1, -1]


def test_clear_rest_zeroes_a_block_after_its_tokens() -> None:
    cache = numbered_cache()
    cache.clear_rest(torch.tensor([1], dtype=torch.int32), 3)
    assert cache.tensor[1, 0, 0].flatten().tolist() == [32, 33, 34, 35, 36, 37, 0, 0]
    assert cache.tensor[1, 1, 1].flatten().tolist() == [56, 57, 58, 59, 60, 61, 0, 0]
    assert cache.tensor[0].flatten().tolist() == list(range(32))
    assert cache.tensor[2].flatten().tolist() == list(range(64, 96))


def test_a_block_is_copied_with_all_its_layers_and_no_other_changes() -> None:
    cache = numbered_cache()
    before = [cache.read_slab(BlockId(i)) for i in range(cache.num_blocks)]
    cache.copy_block(BlockId(1), BlockId(0))
    assert cache.read_slab(BlockId(0)) == before[1] != before[0]
    assert [cache.read_slab(BlockId(i)) for i in range(1, cache.num_blocks)] == before[1:]
