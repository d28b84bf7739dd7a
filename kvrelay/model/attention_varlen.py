"""Paged attention on CUDA by torch's `varlen_attn` with a block table: every row of a step in one call.

torch has had the block table since 2.12. Its built-in FlashAttention 2 does not take it for these layouts (pages of
256 tokens, or none at all, by version); FlashAttention 3 does, with pages of any size, but is a package of its own
(flash-attn-3) and only for compute capability 9.0, which an H100 or H200 is. So this backend is there when both are.

Shape letters: T tokens, R rows, B blocks of a table, H query heads, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.attention import BackendUnavailable
from kvrelay.model.config import ModelConfig
from kvrelay.model.step import StepInput
from kvrelay.model.transfer import on_device

WANTED_PARAMETERS = frozenset(("block_table", "seqused_k", "window_size", "enable_gqa"))
CAUSAL = (-1, 0)  # every earlier position, none later; aligned with the end of the context
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class VarlenPagedAttention:
    varlen_attn: Callable[..., Any]
    max_model_len: int
    name: str = "varlen"
    reads_whole_blocks: bool = True  # not documented either way

    @classmethod
    def probed(cls, device: str, config: ModelConfig, dtype: torch.dtype) -> VarlenPagedAttention:
        """Raises BackendUnavailable, saying what is missing. Makes FlashAttention 3 torch's own for this process."""
        varlen_attn = paged_varlen_attn()
        if dtype not in (torch.bfloat16, torch.float16):
            raise BackendUnavailable(f"varlen_attn takes bfloat16 and float16, not {dtype}")
        if config.head_dim % 8 or config.head_dim > MAX_HEAD_DIM:
            raise BackendUnavailable(f"varlen_attn takes head dims in eights up to 256, not {config.head_dim}")
        capability = torch.cuda.get_device_capability(device)
        if capability[0] != 9:
            raise BackendUnavailable(f"FlashAttention 3 needs compute capability 9.0; this GPU has {capability}")
        _activate_flash_attention_3()
        return cls(varlen_attn, config.max_model_len)

    def plan(self, inp: StepInput, cache: PagedKVCache) -> _VarlenPlan:
        device = inp.block_table_RB.device
        return _VarlenPlan(
            self.varlen_attn,
            query_starts=on_device(inp.query_starts, torch.int32, device),
            context_lens_R=on_device(inp.context_lens, torch.int32, device),
            block_table_RB=inp.block_table_RB,
            max_query_len=max(inp.query_len(row) for row in range(inp.num_rows)),
            max_context_len=max(inp.context_lens),
        )

    def plan_decode(self, context_lens_R: Tensor, block_table_RB: Tensor, cache: PagedKVCache) -> _VarlenPlan:
        starts = torch.arange(len(context_lens_R) + 1, dtype=torch.int32, device=context_lens_R.device)
        return _VarlenPlan(self.varlen_attn, starts, context_lens_R, block_table_RB, 1, self.max_model_len)


@dataclass(frozen=True, slots=True)
class _VarlenPlan:
    varlen_attn: Callable[..., Any]
    query_starts: Tensor  # int32 [R + 1]
    context_lens_R: Tensor  # int32
    block_table_RB: Tensor  # int32
    max_query_len: int
    max_context_len: int

    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        o_THD: Tensor = self.varlen_attn(
            q_THD,
            cache.keys(layer),
            cache.values(layer),
            self.query_starts,
            None,
            self.max_query_len,
            self.max_context_len,
            window_size=CAUSAL,
            enable_gqa=True,
            seqused_k=self.context_lens_R,
            block_table=self.block_table_RB,
        )
        return o_THD


def paged_varlen_attn(module: ModuleType | None = None) -> Callable[..., Any]:
    """`varlen_attn` of this torch, or of `module`, if it takes a block table; else raises BackendUnavailable."""
    if module is None:
        try:
            from torch.nn.attention import varlen
        except ImportError:
            raise BackendUnavailable(f"torch {torch.__version__} has no varlen_attn") from None
        module = varlen
    function: Callable[..., Any] = module.varlen_attn
    missing = WANTED_PARAMETERS - inspect.signature(function).parameters.keys()
    if missing:
        raise BackendUnavailable(f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")
    return function


def _activate_flash_attention_3() -> None:
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except (ImportError, ValueError, RuntimeError) as error:
        raise BackendUnavailable(f"FlashAttention 3 is not there (package flash-attn-3): {error}") from None
