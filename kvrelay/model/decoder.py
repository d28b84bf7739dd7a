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
from kvrelay.model.rotary import RotaryTable, rotate
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

    @torch.inference_mode()
    def step(self, inp: StepInput, cache: PagedKVCache) -> Tensor:
        """Writes K and V of the step's T tokens into the cache; returns logits, float32 [N, V]."""
        _clear_begun_blocks(inp, cache)
        step = _Step(
            *self._rotary.at(inp.positions_T),
            cache=cache,
            cache_rows_T=cache.rows_of(inp.slot_mapping_T),
            attention=self.attention.plan(inp, cache),
        )
        # The residual stream stays in float32: it costs nothing measurable and takes a sixth off bfloat16's error.
        x_TC = F.embedding(inp.token_ids_T, self._embedding_VC).float()
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            o_TC = self._attend(layer, index, x_TC, step)
            if index == last:  # from here on only the rows whose logits are wanted matter
                x_TC, o_TC = x_TC.index_select(0, inp.logit_rows_N), o_TC.index_select(0, inp.logit_rows_N)
            x_TC = self._feed_forward(layer, x_TC + layer.output(o_TC))
        return self._lm_head(self._normalize(x_TC, self._norm_C)).float()

    def _attend(self, layer: DecoderLayer, index: int, x_TC: Tensor, step: _Step) -> Tensor:
        """Attention up to, not including, the output projection: [T, H * D]."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._normalize(x_TC, layer.attention_norm_C))
        qk_THD, v_TKD = qkv.view(len(x_TC), -1, self.config.head_dim).tensor_split((num_heads + num_kv_heads,), 1)
        q_THD, k_TKD = rotate(qk_THD, step.cos_T1D, step.sin_T1D).tensor_split((num_heads,), 1)
        step.cache.store(index, step.cache_rows_T, k_TKD, v_TKD)
        return step.attention.attend(q_THD, index, step.cache).flatten(1)

    def _feed_forward(self, layer: DecoderLayer, x_TC: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalize(x_TC, layer.mlp_norm_C)).chunk(2, -1)
        return x_TC + layer.down(F.silu(gate) * up)

    def _normalize(self, x_TC: Tensor, weight_C: Tensor) -> Tensor:
        """RMS norm of the float32 residual stream, in the dtype of the linears."""
        return F.rms_norm(x_TC, weight_C.shape, weight_C, self.config.rms_norm_eps).to(self._embedding_VC.dtype)


def _clear_begun_blocks(inp: StepInput, cache: PagedKVCache) -> None:
    """A row that writes the first slot of its last block zeroes the rest of it; see PagedKVCache.clear_rest."""
    block_tokens = cache.layout.block_tokens
    for row, context_len in enumerate(inp.context_lens):
        num_tokens = context_len % block_tokens
        if num_tokens and inp.query_len(row) >= num_tokens:
            cache.clear_rest(int(inp.block_table_RB[row, context_len // block_tokens]), num_tokens)
