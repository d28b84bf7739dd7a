"""Paged attention with torch's own operations: serves every device, and is what the other backends are held against.

Shape letters: T tokens, R rows, H query heads, K KV heads, G = H / K, S KV positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention import AttentionPlan
from kvrelay.model.step import StepInput
from kvrelay.model.transfer import on_device

# Padded blocks a group of decode rows may waste before a second group, one more call a layer, is cheaper.
MAX_WASTED_BLOCKS = 16


class PlainPagedAttention:
    """Gathers each row's blocks and calls torch's scaled_dot_product_attention.

    Rows with one query (decode) share a call per group of similar length, padded and masked; others get their own.
    """

    name = "plain"
    reads_whole_blocks = True

    def plan(self, inp: StepInput, cache: PagedKVCache) -> AttentionPlan:
        layout = cache.layout
        num_blocks = [layout.blocks_for(length) for length in inp.context_lens]
        decode_rows = [row for row in range(inp.num_rows) if inp.query_len(row) == 1]
        groups = group_rows(decode_rows, num_blocks, MAX_WASTED_BLOCKS)
        if len(groups) == 1 and len(decode_rows) == inp.num_rows:
            return _DecodeGroup.build(inp, cache, range(inp.num_rows), num_blocks)
        parts = [_Part(_token_indices(inp, rows), _DecodeGroup.build(inp, cache, rows, num_blocks)) for rows in groups]
        for row in range(inp.num_rows):
            if inp.query_len(row) > 1:
                tokens = slice(inp.query_starts[row], inp.query_starts[row + 1])
                parts.append(_Part(tokens, PrefillRow.build(inp, cache, row)))
        return _Parts(parts)


def group_rows(rows: Sequence[int], num_blocks: Sequence[int], max_wasted_blocks: int) -> list[list[int]]:
    """Splits rows into groups to be padded to their longest, each wasting at most `max_wasted_blocks` in all."""
    groups: list[list[int]] = []
    longest = wasted = 0
    for row in sorted(rows, key=lambda row: -num_blocks[row]):
        wasted += longest - num_blocks[row]
        if not groups or wasted > max_wasted_blocks:
            groups.append([])
            longest, wasted = num_blocks[row], 0
        groups[-1].append(row)
    return groups


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: Tensor | slice  # which of the step's tokens
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class _Parts:
    parts: list[_Part]

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        for part in self.parts:
            o_THD[part.tokens] = part.plan.attend(q_THD[part.tokens], layer, cache)
        return o_THD


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """R rows of one query each. The G heads that share a KV head are folded into the query axis: no copy of K or V."""

    block_ids: Tensor  # [R * blocks of the longest]
    mask_R11S: Tensor  # 0 where a position is the row's, else -inf

    @classmethod
    def build(cls, inp: StepInput, cache: PagedKVCache, rows: Sequence[int], num_blocks: Sequence[int]) -> _DecodeGroup:
        device, dtype = inp.block_table_RB.device, cache.tensor.dtype
        num_blocks_R1 = on_device([[num_blocks[row]] for row in rows], torch.int64, device)
        longest = max(num_blocks[row] for row in rows)
        padded_RB = inp.block_table_RB[:, :longest].index_select(0, on_device(list(rows), torch.int64, device))
        own_RB = torch.arange(padded_RB.shape[1], device=device) < num_blocks_R1
        padded_RB = torch.where(own_RB, padded_RB, padded_RB[:, :1])  # any block of the row's own will do
        lengths_R1 = on_device([[inp.context_lens[row]] for row in rows], torch.int64, device)
        positions_S = torch.arange(padded_RB.shape[1] * cache.layout.block_tokens, device=device)
        mask_RS = torch.zeros(len(rows), len(positions_S), dtype=dtype, device=device)
        mask_RS.masked_fill_(positions_S >= lengths_R1, float("-inf"))
        return cls(padded_RB.flatten(), mask_RS[:, None, None])

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        num_rows, num_kv_heads = len(q_THD), cache.layout.num_kv_heads
        k_RKSD = _gather(cache.keys(layer), self.block_ids, num_rows).transpose(1, 2)
        v_RKSD = _gather(cache.values(layer), self.block_ids, num_rows).transpose(1, 2)
        q_RKGD = q_THD.view(num_rows, num_kv_heads, -1, q_THD.shape[-1])
        return F.scaled_dot_product_attention(q_RKGD, k_RKSD, v_RKSD, attn_mask=self.mask_R11S).reshape(q_THD.shape)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """The queries of one row, which see all earlier positions and, among this step's, themselves and those before."""

    block_ids: Tensor
    context_len: int
    mask_TS: Tensor | None  # None: the row starts at position 0, so a plain causal mask fits

    @classmethod
    def build(cls, inp: StepInput, cache: PagedKVCache, row: int) -> PrefillRow:
        query_len, context_len = inp.query_len(row), inp.context_lens[row]
        table = inp.block_table_RB[row, : cache.layout.blocks_for(context_len)]
        if query_len == context_len:
            return cls(table, context_len, None)
        if table.is_cuda:  # a mask that torch's flash attention knows by its kind, so that none is read
            # Brings torch's compiler with it: 70 MB and a second that a node on a CPU can do without.
            from torch.nn.attention.bias import causal_lower_right

            return cls(table, context_len, causal_lower_right(query_len, context_len))
        hidden_TS = torch.ones(query_len, context_len, dtype=torch.bool, device=table.device)
        hidden_TS = hidden_TS.triu_(context_len - query_len + 1)
        mask_TS = torch.zeros(query_len, context_len, dtype=cache.tensor.dtype, device=table.device)
        return cls(table, context_len, mask_TS.masked_fill_(hidden_TS, float("-inf")))

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        k_1KSD = _gather(cache.keys(layer), self.block_ids, 1)[:, : self.context_len].transpose(1, 2)
        v_1KSD = _gather(cache.values(layer), self.block_ids, 1)[:, : self.context_len].transpose(1, 2)
        o_1HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1).unsqueeze(0),
            k_1KSD,
            v_1KSD,
            attn_mask=self.mask_TS,
            is_causal=self.mask_TS is None,
            enable_gqa=True,
        )
        return o_1HTD[0].transpose(0, 1)


def _gather(blocks: Tensor, block_ids: Tensor, num_rows: int) -> Tensor:
    """[num_blocks, block_tokens, K, D] -> [R, S, K, D]: each block is one memory range, copied whole."""
    num_heads, head_dim = blocks.shape[2:]
    return blocks.flatten(1).index_select(0, block_ids).view(num_rows, -1, num_heads, head_dim)


def _token_indices(inp: StepInput, rows: Sequence[int]) -> Tensor:
    return on_device([inp.query_starts[row] for row in rows], torch.int64, inp.token_ids_T.device)
