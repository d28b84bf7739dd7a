"""The KV tensors of a node, block-major: one block of all layers is one contiguous slab of bytes.

The engine thread reads and writes through torch; `read_slab`, `view_slabs`, `write_slab` and `write_part` are plain
memory accesses that the event loop may do itself, for blocks whose ownership (see kvrelay.kv.pool) keeps the engine
away from them.

On CUDA the slabs move on a stream of their own, beside the stream that computes. There is one of each in a process and
no third: prefill and decode are different nodes, so that neither ever waits behind the other's kernels.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_STAGING_BUFFERS = 4  # one on its way and one being filled would do; more ride out a slow copy


class PagedKVCache:
    """`tensor` is [num_blocks, num_layers, 2, block_tokens, num_kv_heads, head_dim], zeros at first.

    One more block lies behind it, which no pool hands out: rows that only fill a batch up write there.
    Shape letters: T tokens of a step, H KV heads, D head dim, N blocks.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: str = "cpu", *, memory: mmap.mmap | None = None
    ) -> None:
        """`memory` is a CPU's, of zeros, for all blocks and the one behind them; by default the cache takes its own."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.scratch_block = BlockId(num_blocks)
        shape, dtype = (num_blocks + 1, *layout.slab_shape), DTYPES[layout.dtype]
        if memory is None:
            all_blocks = _zeros(shape, dtype, device)
        else:
            all_blocks = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.tensor = all_blocks[:num_blocks]
        # One row a token position, K or V, of one layer: what `store` writes to.
        self.rows = all_blocks.view(-1, layout.num_kv_heads, layout.head_dim)
        self._all_blocks = all_blocks
        self._slab_bytes = layout.slab_bytes
        self._bytes = _raw_bytes(self.tensor) if not self.tensor.is_cuda else None
        self._copies = _SlabCopies(all_blocks) if self.tensor.is_cuda else None

    def keys(self, layer: int) -> Tensor:
        """View [num_blocks + 1, block_tokens, H, D]; the last is the scratch block."""
        return self._all_blocks[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """View [num_blocks + 1, block_tokens, H, D]; the last is the scratch block."""
        return self._all_blocks[:, layer, 1]

    def rows_of(self, slot_mapping_T: Tensor) -> Tensor:
        """Where `store` puts the K of each slot in layer 0; once a step. A slot is block id * block_tokens + offset."""
        block_tokens = self.layout.block_tokens
        blocks_T = slot_mapping_T.div(block_tokens, rounding_mode="floor")
        return slot_mapping_T + blocks_T * ((2 * self.layout.num_layers - 1) * block_tokens)

    def store(self, layer: int, rows_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Writes one layer's K and V of a step's tokens; `rows_T` comes from `rows_of`."""
        keys_T = rows_T + 2 * layer * self.layout.block_tokens
        self.rows.index_copy_(0, keys_T, k_THD)
        self.rows.index_copy_(0, keys_T + self.layout.block_tokens, v_THD)

    def clear_rest(self, block_ids_N: Tensor, num_tokens: int) -> None:
        """Zeroes blocks after their first `num_tokens`; the ids stay on the device.

        Attention that reads whole blocks masks what is not there yet; a mask turns any number into nothing, but not
        the NaN that a block's earlier owner may have left.
        """
        self.tensor[:, :, :, num_tokens:].index_fill_(0, block_ids_N.long(), 0)

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Gives `target`, which the engine owns, the contents of `source`: of all layers at once."""
        self.order_after_writes()
        self.tensor[target].copy_(self.tensor[source])

    def read_slab(self, block_id: BlockId) -> bytes:
        """A copy of one block's slab, which nobody may be writing: held, its contents final, its step's result taken.

        On CUDA the caller waits for the copy alone (2 MiB take some 50 us over PCIe 5). So does a thread that comes to
        move slabs itself, or to `order_after_writes`, meanwhile; what the device computes does not.
        """
        return bytes(self.view_slabs((block_id,))[0])

    def view_slabs(self, block_ids: Sequence[BlockId], start: int = 0, end: int | None = None) -> list[Buffer]:
        """Slabs that may not be written to, of blocks that nobody may be writing, as for `read_slab`. Of each the bytes
        from `start` to before `end`, by default all.

        On the CPU they are the blocks' own memory, not copies: the caller must hold the blocks for as long as it looks
        at them, so it is done with them before its next await. On CUDA they are copies, for which it waits once for
        every NUM_STAGING_BUFFERS.
        """
        size = self._slab_bytes
        end = size if end is None else end
        if self._copies is not None:
            return list(self._copies.read(block_ids, start, end))
        assert self._bytes is not None
        return [self._bytes[block_id * size + start : block_id * size + end].toreadonly() for block_id in block_ids]

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None:
        """Fills one block, which the caller's reservation owns. CorruptBlockError unless slab_bytes are given.

        On CUDA the copy may still be under way at the return: `order_after_writes` before what reads it on the device.
        """
        num_bytes = memoryview(payload).nbytes
        if num_bytes != self._slab_bytes:
            raise CorruptBlockError(f"a slab of {num_bytes} bytes; this layout's have {self._slab_bytes}")
        self.write_part(block_id, payload, 0)

    def write_part(self, block_id: BlockId, payload: Buffer, offset_bytes: int) -> None:
        """As `write_slab`, the bytes of the slab from `offset_bytes` on. CorruptBlockError for what is outside of it:
        there the next block lies."""
        source = memoryview(payload).cast("B")
        if not 0 <= offset_bytes <= offset_bytes + source.nbytes <= self._slab_bytes:
            raise CorruptBlockError(
                f"{source.nbytes} bytes from byte {offset_bytes} of a slab; this layout's have {self._slab_bytes}"
            )
        if self._copies is not None:
            self._copies.write(block_id, source, offset_bytes)
            return
        assert self._bytes is not None
        start = block_id * self._slab_bytes + offset_bytes
        self._bytes[start : start + source.nbytes] = source

    def order_after_writes(self) -> None:
        """What the calling thread queues from now on runs after every slab written so far; the host does not wait."""
        if self._copies is not None:
            self._copies.order_after_writes()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On the CPU in large pages, where the system gives them: attention walks through blocks in any order."""
    if device != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory as bytes, writable."""
    return tensor.view(torch.uint8).view(-1).numpy().data


@dataclass(slots=True)
class _Staging:
    """A pinned slab, and what was last copied to or from it."""

    slab: Tensor  # uint8 [slab_bytes], in host memory
    event: torch.cuda.Event

    @classmethod
    def new(cls, num_bytes: int) -> _Staging:
        return cls(_pinned(num_bytes), torch.cuda.Event())  # type: ignore[no-untyped-call]

    def bytes(self, num_bytes: int) -> memoryview:
        """The first of them."""
        return self.slab[:num_bytes].numpy().data


class _SlabCopies:
    """Slabs, and parts of them, between a device and host memory: one stream, a few pinned buffers in turn. Any thread
    may call."""

    def __init__(self, blocks: Tensor) -> None:
        """`blocks` is [N, ...], each a slab."""
        self._slabs = blocks.view(torch.uint8).view(len(blocks), -1)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(blocks.device))  # which zeroes the blocks
        self._ring = [_Staging.new(self._slabs.shape[1]) for _ in range(NUM_STAGING_BUFFERS)]
        self._turn = 0
        self._written: torch.cuda.Event | None = None  # the last write: the stream's order makes it every write
        self._lock = threading.Lock()  # the event loop copies handoffs, the engine thread what it swaps

    def read(self, block_ids: Sequence[int], start: int, end: int) -> list[bytes]:
        """Of each slab the bytes from `start` to before `end`. As many at a time as there are buffers, with one wait
        for them; other threads' turns come between."""
        slabs: list[bytes] = []
        for first in range(0, len(block_ids), len(self._ring)):
            with self._lock:
                reading = block_ids[first : first + len(self._ring)]
                filling = [self._start_read(self._slabs[block_id, start:end]) for block_id in reading]
                filling[-1].event.synchronize()  # the stream's order makes it the others' too
                slabs += [bytes(staging.bytes(end - start)) for staging in filling]
        return slabs

    def _start_read(self, source: Tensor) -> _Staging:
        staging = self._next()
        self._copy(staging, staging.slab[: len(source)], source)
        return staging

    def write(self, block_id: int, source: memoryview, offset_bytes: int) -> None:
        with self._lock:
            staging, num_bytes = self._next(), source.nbytes
            staging.bytes(num_bytes)[:] = source
            target = self._slabs[block_id, offset_bytes : offset_bytes + num_bytes]
            self._copy(staging, target, staging.slab[:num_bytes])
            self._written = staging.event

    def order_after_writes(self) -> None:
        with self._lock:
            if self._written is not None:
                torch.cuda.current_stream(self._slabs.device).wait_event(self._written)
                self._written = None

    def _next(self) -> _Staging:
        """The buffer whose copy is longest ago, once that is done: the ring's length of copies may be under way."""
        staging = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        staging.event.synchronize()  # of an event not yet recorded returns at once
        return staging

    def _copy(self, staging: _Staging, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            staging.event.record(self._stream)


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
