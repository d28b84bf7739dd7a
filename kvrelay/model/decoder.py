"""A Llama-architecture decoder over a paged KV cache: one step computes any mix of prompt chunks and single tokens.

Shape letters: T tokens of the step, N tokens whose logits are wanted, C hidden size, H query heads, K KV heads,
D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention import AttentionBackend, AttentionPlan
from kvrelay.model.config import ModelConfig
from kvrelay.model.linear import Linear
from kvrelay.model.pointwise import Pointwise
from kvrelay.model.rotary import RotaryTable
from kvrelay.model.step import StepInput as StepInput


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; q, k, v and gate, up are each one matrix. Norms are float32."""

    attention_norm_C: Tensor
    qkv: Linear
    output: Linear
    mlp_norm_C: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """What every layer of a step needs, worked out once."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    cache: PagedKVCache
    cache_rows_T: Tensor
    attention: AttentionPlan


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        *,
        embedding_VC: Tensor,
        layers: list[DecoderLayer],
        norm_C: Tensor,
        lm_head: Linear,
        rotary: RotaryTable,
        attention: AttentionBackend,
        pointwise: Pointwise,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.attention = attention
        self.backend_name = f"torch-{attention.name}"
        self._embedding_VC = embedding_VC
        self._layers = layers
        self._norm_C = norm_C
        self._lm_head = lm_head
        self._rotary = rotary
        self._pointwise = pointwise

    @torch.inference_mode()
    def step(self, inp: StepInput, cache: PagedKVCache) -> Tensor:
        """Writes K and V of the step's T tokens into the cache; returns logits, float32 [N, V]."""
        if self.attention.reads_whole_blocks:
            clear_begun_blocks(inp, cache)
        return self.forward(inp, self.attention.plan(inp, cache), cache).float()

    def forward(self, inp: StepInput, attention: AttentionPlan, cache: PagedKVCache) -> Tensor:
        """Logits [N, V] in the model's dtype. Of `inp` only tensors are read, so that a CUDA graph may hold this."""
        step = _Step(
            *self._rotary.at(inp.positions_T),
            cache=cache,
            cache_rows_T=cache.rows_of(inp.slot_mapping_T),
            attention=attention,
        )
        # The residual stream stays in float32: it costs nothing measurable and takes a sixth off bfloat16's error.
        x_TC = F.embedding(inp.token_ids_T, self._embedding_VC).float()
        delta_TC = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            o_TC = self._attend(layer, index, x_TC, delta_TC, step)
            if index == last:  # from here on only the rows whose logits are wanted matter
                x_TC, o_TC = x_TC.index_select(0, inp.logit_rows_N), o_TC.index_select(0, inp.logit_rows_N)
            delta_TC = self._feed_forward(layer, x_TC, layer.output(o_TC))
        return self._lm_head(self._add_and_normalize(x_TC, delta_TC, self._norm_C))

    def _attend(self, layer: DecoderLayer, index: int, x_TC: Tensor, delta_TC: Tensor | None, step: _Step) -> Tensor:
        """Attention up to, not including, the output projection: [T, H * D]."""
        qkv = layer.qkv(self._add_and_normalize(x_TC, delta_TC, layer.attention_norm_C))
        q_THD = self._pointwise.rotate_and_store(qkv, step.cos_T1D, step.sin_T1D, step.cache, index, step.cache_rows_T)
        return step.attention.attend(q_THD, index, step.cache).flatten(1)

    def _feed_forward(self, layer: DecoderLayer, x_TC: Tensor, delta_TC: Tensor) -> Tensor:
        return layer.down(
            self._pointwise.gate(layer.gate_up(self._add_and_normalize(x_TC, delta_TC, layer.mlp_norm_C)))
        )

    def _add_and_normalize(self, x_TC: Tensor, delta_TC: Tensor | None, weight_C: Tensor) -> Tensor:
        """What the last block added joins the residual stream, in place; its norm goes into the next."""
        return self._pointwise.add_and_normalize(x_TC, delta_TC, weight_C, self.config.rms_norm_eps)


def clear_begun_blocks(inp: StepInput, cache: PagedKVCache) -> None:
    """A row that writes the first slot of its last block zeroes the rest of it; see PagedKVCache.clear_rest."""
    block_tokens = cache.layout.block_tokens
    for row, context_len in enumerate(inp.context_lens):
        num_tokens = context_len % block_tokens
        if num_tokens and inp.query_len(row) >= num_tokens:
            last = context_len // block_tokens
            cache.clear_rest(inp.block_table_RB[row, last : last + 1], num_tokens)
