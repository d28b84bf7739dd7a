"""How slabs go through pinned buffers, with a stand-in for CUDA that copies at once and notes who waits for what."""

from __future__ import annotations

import struct
from contextlib import nullcontext

import pytest
import torch

from kvrelay.kv import cache as cache_module
from kvrelay.kv.cache import NUM_STAGING_BUFFERS, PagedKVCache
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_tokens=4)


class FakeCuda:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = 0


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {stream.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for event {event.number}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.number = cuda, cuda.num_events
        cuda.num_events += 1

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"{stream.name} records event {self.number}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for event {self.number}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(cuda, "copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(cuda, "compute"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(cuda))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(cache_module, "_pinned", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    return cuda


@pytest.fixture
def cache(cuda: FakeCuda) -> PagedKVCache:
    """Five blocks that are copied as a GPU's would be."""
    cache = PagedKVCache(LAYOUT, 5)
    cache._copies = cache_module._SlabCopies(cache._all_blocks)
    assert cuda.log == ["copies waits for compute"]  # which zeroes the blocks
    cuda.log.clear()
    return cache


def slab(first: int) -> bytes:
    return struct.pack("<32f", *range(first, first + 32))


def test_a_slab_read_is_waited_for(cache: PagedKVCache, cuda: FakeCuda) -> None:
    cache.tensor[3].copy_(torch.arange(32.0).view(LAYOUT.slab_shape))
    assert cache.read_slab(BlockId(3)) == slab(0)
    assert cuda.log == ["host waits for event 0", "copies records event 0", "host waits for event 0"]


def test_slabs_viewed_are_copied_a_ring_at_a_time_with_one_wait(cache: PagedKVCache, cuda: FakeCuda) -> None:
    cache.tensor.copy_(torch.arange(5 * 32.0).view(cache.tensor.shape))
    views = cache.view_slabs([BlockId(block) for block in (4, 0, 1, 2, 3)])
    assert views == [slab(32 * block) for block in (4, 0, 1, 2, 3)]
    waits = [line for line in cuda.log if line.startswith("host")]
    assert waits == [f"host waits for event {turn}" for turn in (0, 1, 2, 3, 3, 0, 0)]
    assert cuda.log[7:9] == ["copies records event 3", "host waits for event 3"], "all four are on their way by then"
    cache.tensor.zero_()
    assert views[1] == slab(0)


def test_another_thread_has_its_turn_between_two_rings(cache: PagedKVCache, cuda: FakeCuda) -> None:
    """However many slabs one thread reads, the engine's waits behind one ring of copies at most."""

    class Lock:
        def __enter__(self) -> None:
            cuda.log.append("locked")

        def __exit__(self, *exc: object) -> None:
            cuda.log.append("free")

    assert cache._copies is not None
    cache._copies._lock = Lock()  # type: ignore[assignment]
    cache.view_slabs([BlockId(block) for block in (4, 0, 1, 2, 3)])
    assert [line for line in cuda.log if line in ("locked", "free")] == ["locked", "free"] * 2


def test_a_slab_written_is_not(cache: PagedKVCache, cuda: FakeCuda) -> None:
    cache.write_slab(BlockId(2), slab(50))
    assert cuda.log == ["host waits for event 0", "copies records event 0"]  # the first: that the buffer is free
    assert cache.tensor[2].flatten().tolist() == list(range(50, 82))
    assert not cache.tensor[:2].any()
    assert not cache.tensor[3:].any()


def test_parts_of_slabs_move_alone(cache: PagedKVCache, cuda: FakeCuda) -> None:
    """Only their bytes go through the buffers: what another slab left there stays where it is."""
    cache.write_slab(BlockId(2), slab(50))
    for _ in range(NUM_STAGING_BUFFERS):  # until the same buffer comes again
        cache.write_part(BlockId(3), slab(200)[8:20], 8)
    assert cache.tensor[3].flatten().tolist() == [0, 0, 202, 203, 204, *[0] * 27]
    assert cache.view_slabs([BlockId(2), BlockId(3)], 8, 16) == [slab(50)[8:16], slab(200)[8:16]]


def test_buffers_take_turns_and_are_free_before_they_are_filled(cache: PagedKVCache, cuda: FakeCuda) -> None:
    for block in range(NUM_STAGING_BUFFERS + 1):
        cache.write_slab(BlockId(block), slab(block))
    waits = [line for line in cuda.log if line.startswith("host")]
    assert waits == [f"host waits for event {turn}" for turn in (0, 1, 2, 3, 0)]
    assert [int(cache.tensor[block].flatten()[0]) for block in range(5)] == [0, 1, 2, 3, 4]


def test_what_computes_waits_for_the_last_write_once(cache: PagedKVCache, cuda: FakeCuda) -> None:
    cache.order_after_writes()
    assert cuda.log == []
    cache.write_slab(BlockId(0), slab(0))
    cache.write_slab(BlockId(1), slab(0))
    cuda.log.clear()
    cache.order_after_writes()
    cache.order_after_writes()
    assert cuda.log == ["compute waits for event 1"]


def test_a_slab_of_another_length_touches_no_buffer(cache: PagedKVCache, cuda: FakeCuda) -> None:
    with pytest.raises(cache_module.CorruptBlockError):
        cache.write_slab(BlockId(0), slab(0)[:-1])
    assert cuda.log == []
