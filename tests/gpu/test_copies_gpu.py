"""Slabs to and from the device, beside what computes there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId
from tests.support.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # slabs of 2 MiB
ABOUT_A_SECOND = 2_000_000_000  # clock cycles


def random_cache(num_blocks: int = 16) -> PagedKVCache:
    cache = PagedKVCache(LAYOUT, num_blocks, "cuda")
    cache.tensor.normal_(generator=torch.Generator("cuda").manual_seed(0))
    torch.cuda.synchronize()
    return cache


@pytest.fixture(autouse=True)
def _quiet_device() -> None:
    torch.cuda.synchronize()


def test_slabs_move_bit_for_bit() -> None:
    source, target = random_cache(), PagedKVCache(LAYOUT, 16, "cuda")
    for block in range(16):
        slab = source.read_slab(BlockId(block))
        assert len(slab) == LAYOUT.slab_bytes
        target.write_slab(BlockId(15 - block), slab)
    target.order_after_writes()
    assert torch.equal(target.tensor, source.tensor.flip(0))
    assert slab == source.tensor[15].cpu().view(torch.uint8).numpy().tobytes()


def test_neither_reading_nor_writing_waits_for_what_computes() -> None:
    cache = random_cache()
    slab = cache.read_slab(BlockId(1))  # makes what is made at the first time
    cache.write_slab(BlockId(2), slab)
    torch.cuda.synchronize()
    torch.cuda._sleep(ABOUT_A_SECOND)
    computed = torch.cuda.Event()
    computed.record()
    started = time.monotonic()
    assert cache.read_slab(BlockId(1)) == slab
    for block in range(2, 12):
        cache.write_slab(BlockId(block), slab)
    assert cache.read_slab(BlockId(11)) == slab
    assert time.monotonic() - started < 0.2
    assert not computed.query(), "the computation ended sooner than the copies"


def test_what_computes_after_a_write_reads_what_was_written() -> None:
    cache = random_cache()
    slabs = [cache.read_slab(BlockId(block)) for block in range(8)]
    for block in range(8):
        cache.write_slab(BlockId(8 + block), slabs[block])
    cache.order_after_writes()
    moved = cache.tensor[8:].clone()
    assert torch.equal(moved, cache.tensor[:8])


def test_two_threads_copy_at_once() -> None:
    cache = random_cache()
    slabs = [cache.read_slab(BlockId(block)) for block in range(16)]
    wrong: list[int] = []

    def work(blocks: range) -> None:
        for _ in range(20):
            for block in blocks:
                cache.write_slab(BlockId(block), slabs[block])
                if cache.read_slab(BlockId(block)) != slabs[block]:
                    wrong.append(block)

    threads = [threading.Thread(target=work, args=(blocks,)) for blocks in (range(8), range(8, 16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_many_slabs_at_once_are_those_read_one_by_one() -> None:
    cache = random_cache()
    blocks = [BlockId(block) for block in (11, 3, 15, 0, 7, 8, 2, 9, 1, 14)]
    assert cache.view_slabs(blocks) == [cache.read_slab(block) for block in blocks]


def test_parts_of_slabs_move_bit_for_bit() -> None:
    """A mebibyte at a time, as a handoff cuts slabs of 2 MiB."""
    source, target = random_cache(), PagedKVCache(LAYOUT, 16, "cuda")
    half = LAYOUT.slab_bytes // 2
    for block in range(16):
        for start in (0, half):
            (part,) = source.view_slabs([BlockId(block)], start, start + half)
            assert len(part) == half
            target.write_part(BlockId(15 - block), part, start)
    target.order_after_writes()
    assert torch.equal(target.tensor, source.tensor.flip(0))
