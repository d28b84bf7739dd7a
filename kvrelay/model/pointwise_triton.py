"""A decoder's small operations as Triton kernels; see kvrelay.model.pointwise. They compute in float32, round once.

Shape letters: T tokens, C hidden size, I inner size of the MLP, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache

GATE_TILE = 1024  # numbers of one program


class TritonPointwise:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def add_and_normalize(self, x_TC: Tensor, delta_TC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        normal_TC = torch.empty_like(x_TC, dtype=self._dtype)
        _add_and_normalize[(len(x_TC),)](
            *(x_TC, x_TC if delta_TC is None else delta_TC, weight_C, normal_TC),
            epsilon,
            ADDS=delta_TC is not None,
            SIZE=x_TC.shape[1],
            PADDED_SIZE=triton.next_power_of_2(x_TC.shape[1]),
            num_warps=8,
        )
        return normal_TC

    def rotate_and_store(
        self, qkv: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, cache: PagedKVCache, layer: int, cache_rows_T: Tensor
    ) -> Tensor:
        layout = cache.layout
        num_heads = qkv.shape[1] // layout.head_dim - 2 * layout.num_kv_heads
        q_THD = torch.empty(len(qkv), num_heads, layout.head_dim, dtype=qkv.dtype, device=qkv.device)
        half = layout.head_dim // 2
        _rotate_and_store[(len(qkv), num_heads + 2 * layout.num_kv_heads)](
            *(qkv, cos_T1D, sin_T1D, cache_rows_T, q_THD, cache.rows, 2 * layer * layout.block_tokens),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=layout.num_kv_heads,
            BLOCK_TOKENS=layout.block_tokens,
            HALF=half,
            PADDED_HALF=triton.next_power_of_2(half),
            num_warps=1,
        )
        return q_THD

    def gate(self, gate_up: Tensor) -> Tensor:
        num_tokens, inner = len(gate_up), gate_up.shape[1] // 2
        gated = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
        _gate[(num_tokens, triton.cdiv(inner, GATE_TILE))](gate_up, gated, INNER=inner, TILE=GATE_TILE)
        return gated


@triton.jit
def _add_and_normalize(
    x_ptr, delta_ptr, weight_ptr, normal_ptr, epsilon, ADDS: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr
):
    column = tl.arange(0, PADDED_SIZE)
    there = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(x_ptr + place, mask=there, other=0.0)
    if ADDS:
        x += tl.load(delta_ptr + place, mask=there, other=0.0).to(tl.float32)
        tl.store(x_ptr + place, x, mask=there)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    weight = tl.load(weight_ptr + column, mask=there, other=0.0)
    tl.store(normal_ptr + place, (x * scale * weight).to(normal_ptr.dtype.element_ty), mask=there)


# `layer_rows` differs from layer to layer and must not compile anything anew.
@triton.jit(do_not_specialize=["layer_rows"])
def _rotate_and_store(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    cache_rows_ptr,
    q_ptr,
    cache_ptr,
    layer_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """One head of one token: the (i, i + D/2) pairs of a query or key head turned, a value head as it is."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PADDED_HALF)
    there = pair < HALF
    dtype = q_ptr.dtype.element_ty
    first_ptr = qkv_ptr + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + pair
    first = tl.load(first_ptr, mask=there, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=there, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        angle = token * (2 * HALF) + HALF + pair  # the second half of a table's row has the plain sine
        cos = tl.load(cos_ptr + angle, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=there, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < NUM_HEADS:
        out_ptr = q_ptr + (token * NUM_HEADS + head) * (2 * HALF) + pair
    else:
        kv_head = head - NUM_HEADS
        is_value = kv_head // NUM_KV_HEADS
        cache_row = tl.load(cache_rows_ptr + token) + layer_rows + is_value * BLOCK_TOKENS
        out_ptr = cache_ptr + (cache_row * NUM_KV_HEADS + kv_head % NUM_KV_HEADS) * (2 * HALF) + pair
    tl.store(out_ptr, first.to(dtype), mask=there)
    tl.store(out_ptr + HALF, second.to(dtype), mask=there)


@triton.jit
def _gate(gate_up_ptr, gated_ptr, INNER: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < INNER
    gate = tl.load(gate_up_ptr + token * (2 * INNER) + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * INNER) + INNER + column, mask=there, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(gated_ptr + token * INNER + column, gated.to(gated_ptr.dtype.element_ty), mask=there)
