"""Paged attention on CUDA by a Triton kernel for rows of one token (decode), by torch's flash attention for prompts.

A prompt's chunk reads each K and V once for many queries, so that gathering its blocks first costs next to nothing and
torch's own kernels, the fastest at hand, can have them. A decode row reads its whole context for one query, which only
a kernel that follows the block table does at the memory's speed. This is flash decoding: a row's context is cut into
at most NUM_SPLITS parts, which run side by side and are merged after. The cut depends on the row's own length alone,
so that a row's result does not depend on its batch.

Shape letters: T tokens, R rows of one token, B blocks of a table, H query heads, K KV heads, G = H / K, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention_plain import PrefillRow
from kvrelay.model.config import ModelConfig
from kvrelay.model.step import StepInput
from kvrelay.model.transfer import on_device

NUM_SPLITS = 16  # with 8 KV heads, one long row alone fills a GPU of 132 processors
MIN_SPLIT_TOKENS = 128  # under this a part costs more to merge than it saves
MIN_DOT_ROWS = 16  # of the tensor cores: G queries are padded to it
LOG2_E = 1.4426950408889634  # the kernel's powers are of 2


@dataclass(frozen=True, slots=True)
class TritonPagedAttention:
    config: ModelConfig
    name: str = "triton"
    reads_whole_blocks: bool = False  # the kernel loads no position beyond a row's length

    def plan(self, inp: StepInput, cache: PagedKVCache) -> _MixedPlan:
        decode_rows = [row for row in range(inp.num_rows) if inp.query_len(row) == 1]
        prefill_rows = [row for row in range(inp.num_rows) if inp.query_len(row) > 1]
        return _MixedPlan(
            self._decode(inp, decode_rows) if decode_rows else None,
            [_Prefill(inp.tokens_of(row), PrefillRow.build(inp, cache, row)) for row in prefill_rows],
        )

    def plan_decode(self, context_lens_R: Tensor, block_table_RB: Tensor, cache: PagedKVCache) -> _DecodePlan:
        tokens_R = torch.arange(len(context_lens_R), dtype=torch.int32, device=context_lens_R.device)
        return self._plan(tokens_R, context_lens_R, block_table_RB)

    def _decode(self, inp: StepInput, rows: list[int]) -> _DecodePlan:
        device, table_RB = inp.block_table_RB.device, inp.block_table_RB
        if len(rows) < inp.num_rows:
            table_RB = table_RB.index_select(0, on_device(rows, torch.int64, device))
        return self._plan(
            on_device([inp.query_starts[row] for row in rows], torch.int32, device),
            on_device([inp.context_lens[row] for row in rows], torch.int32, device),
            table_RB,
        )

    def _plan(self, tokens_R: Tensor, context_lens_R: Tensor, block_table_RB: Tensor) -> _DecodePlan:
        shape, device = (len(tokens_R), self.config.num_heads, NUM_SPLITS), tokens_R.device
        return _DecodePlan(
            tokens_R=tokens_R,
            context_lens_R=context_lens_R,
            block_table_RB=block_table_RB,
            parts=torch.empty(*shape, self.config.head_dim, dtype=torch.float32, device=device),
            part_sums=torch.empty(shape, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    tokens_R: Tensor  # int32: where the row's query is among the step's, as its output is
    context_lens_R: Tensor  # int32
    block_table_RB: Tensor  # int32, rows contiguous
    parts: Tensor  # [R, H, NUM_SPLITS, D] each part's output; only those that a row has are written and read
    part_sums: Tensor  # [R, H, NUM_SPLITS] log2 of each part's sum of exponentials

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        self.attend_into(o_THD, q_THD, layer, cache)
        return o_THD

    def attend_into(self, o_THD: Tensor, q_THD: Tensor, layer: int, cache: PagedKVCache) -> None:
        """`q_THD` and `o_THD` are contiguous."""
        keys, layout = cache.keys(layer), cache.layout
        num_rows, num_heads, head_dim = len(self.tokens_R), q_THD.shape[1], q_THD.shape[2]
        padded_dim = triton.next_power_of_2(max(head_dim, MIN_DOT_ROWS))
        group = num_heads // layout.num_kv_heads
        _attend_part[(num_rows, layout.num_kv_heads, NUM_SPLITS)](
            *(q_THD, keys, cache.values(layer), self.tokens_R, self.context_lens_R, self.block_table_RB),
            *(self.parts, self.part_sums, self.block_table_RB.stride(0), keys.stride(0), keys.stride(1)),
            head_dim**-0.5 * LOG2_E,
            GROUP=group,
            PADDED_GROUP=triton.next_power_of_2(max(group, MIN_DOT_ROWS)),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            BLOCK_TOKENS=layout.block_tokens,
            # Several programs then fit into a processor's shared memory; tests compile it and look.
            TILE=64 if padded_dim * keys.element_size() <= 256 else 32,
            NUM_SPLITS=NUM_SPLITS,
            MIN_SPLIT_TOKENS=MIN_SPLIT_TOKENS,
        )
        _merge_parts[(num_rows, num_heads)](
            *(self.parts, self.part_sums, self.tokens_R, self.context_lens_R, o_THD),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            NUM_SPLITS=NUM_SPLITS,
            MIN_SPLIT_TOKENS=MIN_SPLIT_TOKENS,
        )


@dataclass(frozen=True, slots=True)
class _Prefill:
    tokens: slice
    row: PrefillRow


@dataclass(frozen=True, slots=True)
class _MixedPlan:
    decode: _DecodePlan | None
    prefills: list[_Prefill]

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        if self.decode is not None:
            self.decode.attend_into(o_THD, q_THD, layer, cache)
        for prefill in self.prefills:
            o_THD[prefill.tokens] = prefill.row.attend(q_THD[prefill.tokens], layer, cache)
        return o_THD


@triton.jit
def _part_tokens(context_len, NUM_SPLITS: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr):
    """How many tokens each part of a row takes, a multiple of MIN_SPLIT_TOKENS."""
    return tl.cdiv(tl.cdiv(context_len, NUM_SPLITS), MIN_SPLIT_TOKENS) * MIN_SPLIT_TOKENS


# `table_stride` changes with the longest row of a step and must not compile anything anew.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_part(
    q_ptr,
    k_ptr,
    v_ptr,
    tokens_ptr,
    context_lens_ptr,
    table_ptr,
    parts_ptr,
    part_sums_ptr,
    table_stride,
    block_stride,
    token_stride,
    scale,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
):
    """One part of the context of one row's G query heads that share a KV head."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    context_len = tl.load(context_lens_ptr + row)
    part_tokens = _part_tokens(context_len, NUM_SPLITS, MIN_SPLIT_TOKENS)
    start = split * part_tokens
    end = tl.minimum(start + part_tokens, context_len)
    if start >= end:
        return
    group, dim, tile = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TILE)
    heads = kv_head * GROUP + group
    own = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    token = tl.load(tokens_ptr + row).to(tl.int64)  # a pool has more than 2^31 numbers, a step's queries may have
    q = tl.load(q_ptr + token * (num_heads * HEAD_DIM) + heads[:, None] * HEAD_DIM + dim[None, :], mask=own, other=0.0)
    largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    output = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for first in range(start, end, TILE):
        position = first + tile
        there = position < end
        block = tl.load(table_ptr + row.to(tl.int64) * table_stride + position // BLOCK_TOKENS, mask=there, other=0)
        offset = block.to(tl.int64) * block_stride + (position % BLOCK_TOKENS) * token_stride + kv_head * HEAD_DIM
        kv_offset, kv_there = offset[:, None] + dim[None, :], there[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + kv_offset, mask=kv_there, other=0.0)
        v = tl.load(v_ptr + kv_offset, mask=kv_there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    part = (row.to(tl.int64) * num_heads + heads) * NUM_SPLITS + split
    tl.store(parts_ptr + part[:, None] * HEAD_DIM + dim[None, :], output / total[:, None], mask=own)
    tl.store(part_sums_ptr + part, largest + tl.log2(total), mask=group < GROUP)


@triton.jit
def _merge_parts(
    parts_ptr,
    part_sums_ptr,
    tokens_ptr,
    context_lens_ptr,
    o_ptr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
):
    """The parts of one head of one row, each weighted with its share of the exponentials."""
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    context_len = tl.load(context_lens_ptr + row)
    num_parts = tl.cdiv(context_len, _part_tokens(context_len, NUM_SPLITS, MIN_SPLIT_TOKENS))
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    there, own = split < num_parts, dim < HEAD_DIM
    part = (row.to(tl.int64) * num_heads + head) * NUM_SPLITS + split
    sums = tl.load(part_sums_ptr + part, mask=there, other=float("-inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    parts = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dim[None, :], mask=there[:, None] & own[None, :], other=0.0)
    output = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    tl.store(o_ptr + (token * num_heads + head) * HEAD_DIM + dim, output.to(o_ptr.dtype.element_ty), mask=own)
