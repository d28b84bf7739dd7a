"""The KV tensors of a node, block-major: one block of all layers is one contiguous slab of bytes.

The engine thread reads and writes through torch; `read_slab` and `write_slab` are plain memory copies that the
event loop may do itself, for blocks whose ownership (see kvrelay.kv.pool) keeps the engine away from them.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKVCache:
    """`tensor` is [num_blocks, num_layers, 2, block_tokens, num_kv_heads, head_dim], zeros at first.

    Shape letters: T tokens of a step, H KV heads, D head dim.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = _zeros((num_blocks, *layout.slab_shape), DTYPES[layout.dtype], device)
        # One row a token position, K or V, of one layer: what `store` writes to.
        self._rows = self.tensor.view(-1, layout.num_kv_heads, layout.head_dim)
        self._bytes = _raw_bytes(self.tensor) if device == "cpu" else None

    def keys(self, layer: int) -> Tensor:
        """View [num_blocks, block_tokens, H, D]."""
        return self.tensor[:, layer, 0]

    def values(self, layer: int) -> Tensor:
        """View [num_blocks, block_tokens, H, D]."""
        return self.tensor[:, layer, 1]

    def rows_of(self, slot_mapping_T: Tensor) -> Tensor:
        """Where `store` puts the K of each slot in layer 0; once a step. A slot is block id * block_tokens + offset."""
        block_tokens = self.layout.block_tokens
        blocks_T = slot_mapping_T.div(block_tokens, rounding_mode="floor")
        return slot_mapping_T + blocks_T * ((2 * self.layout.num_layers - 1) * block_tokens)

    def store(self, layer: int, rows_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Writes one layer's K and V of a step's tokens; `rows_T` comes from `rows_of`."""
        keys_T = rows_T + 2 * layer * self.layout.block_tokens
        self._rows.index_copy_(0, keys_T, k_THD)
        self._rows.index_copy_(0, keys_T + self.layout.block_tokens, v_THD)

    def clear_rest(self, block_id: int, num_tokens: int) -> None:
        """Zeroes a block after its first `num_tokens`.

        Attention reads whole blocks and masks what is not there yet; a mask turns any number into nothing, but not
        the NaN that a block's earlier owner may have left.
        """
        self.tensor[block_id, :, :, num_tokens:] = 0

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Gives `target`, which the engine owns, the contents of `source`: of all layers at once."""
        self.tensor[target].copy_(self.tensor[source])

    def read_slab(self, block_id: BlockId) -> bytes:
        """A copy of one block's slab, which nobody may be writing: held, its contents final."""
        if self._bytes is None:
            return self.tensor[block_id].cpu().view(torch.uint8).numpy().tobytes()
        start = block_id * self.layout.slab_bytes
        return bytes(self._bytes[start : start + self.layout.slab_bytes])

    def write_slab(self, block_id: BlockId, payload: bytes | bytearray | memoryview) -> None:
        """Fills one block, which the caller's reservation owns. CorruptBlockError unless slab_bytes are given."""
        source = memoryview(payload).cast("B")
        if source.nbytes != self.layout.slab_bytes:
            raise CorruptBlockError(f"a slab of {source.nbytes} bytes; this layout's have {self.layout.slab_bytes}")
        if self._bytes is None:
            slab = torch.frombuffer(bytearray(source), dtype=self.tensor.dtype).view(self.layout.slab_shape)
            self.tensor[block_id].copy_(slab)
            return
        start = block_id * self.layout.slab_bytes
        self._bytes[start : start + self.layout.slab_bytes] = source


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """On the CPU in large pages, where the system gives them: attention walks through blocks in any order."""
    if device != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's own memory as bytes, writable."""
    return tensor.view(torch.uint8).view(-1).numpy().data
