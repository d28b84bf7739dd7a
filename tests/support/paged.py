"""Rows at random places of a paged cache of random numbers: what attention backends are tried on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.layout import KVLayout
from kvrelay.model.config import ModelConfig
from kvrelay.model.step import StepInput
from tests.support.steps import Row, step_input


def make_config(
    *, num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 8, max_model_len: int = 4096
) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=64,
        vocab_size=64,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_model_len=max_model_len,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )


def random_cache(layout: KVLayout, num_blocks: int, device: str = "cpu") -> PagedKVCache:
    cache = PagedKVCache(layout, num_blocks, device)
    values = torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(0))
    cache.tensor.copy_(values)
    return cache


def random_rows(rows: list[tuple[int, int]], cache: PagedKVCache) -> StepInput:
    """A step of (earlier tokens, tokens of this step) each, on the cache's device; blocks are drawn at random."""
    free = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    laid = []
    for earlier, count in rows:
        blocks = [free.pop() for _ in range(cache.layout.blocks_for(earlier + count))]
        laid.append((Row([0] * (earlier + count), blocks, num_done=earlier), count))
    inp = step_input(laid, cache.layout.block_tokens)
    device = cache.tensor.device
    tensors = ("token_ids_T", "positions_T", "slot_mapping_T", "block_table_RB", "logit_rows_N")
    return replace(inp, **{name: getattr(inp, name).to(device) for name in tensors})


def random_queries(inp: StepInput, config: ModelConfig, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    q_THD = torch.randn(inp.query_starts[-1], config.num_heads, config.head_dim, generator=generator)
    return q_THD.to(like)
