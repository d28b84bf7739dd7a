"""Attention over every position a block table could name, masked: for tests of what records and replays a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention_plain import PlainPagedAttention


class DenseAttention(PlainPagedAttention):
    """A CapturableBackend."""

    name = "dense"

    def plan_decode(self, context_lens_R: Tensor, block_table_RB: Tensor, cache: PagedKVCache) -> DensePlan:
        return DensePlan(context_lens_R, block_table_RB)


@dataclass(frozen=True, slots=True)
class DensePlan:
    context_lens_R: Tensor
    block_table_RB: Tensor

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        group = q_THD.shape[1] // cache.layout.num_kv_heads
        k_RSHD, v_RSHD = (
            blocks[self.block_table_RB.long()].flatten(1, 2).repeat_interleave(group, 2)
            for blocks in (cache.keys(layer), cache.values(layer))
        )
        scores_RHS = torch.einsum("rhd,rshd->rhs", q_THD, k_RSHD) * q_THD.shape[-1] ** -0.5
        hidden_RS = torch.arange(k_RSHD.shape[1]) >= self.context_lens_R[:, None]
        weights_RHS = scores_RHS.masked_fill(hidden_RS[:, None], float("-inf")).softmax(-1)
        return torch.einsum("rhs,rshd->rhd", weights_RHS, v_RSHD)
