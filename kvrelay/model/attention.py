"""Attention of a step's queries over the paged KV cache: what a backend is, and which one a device gets.

A backend plans a step once (which blocks, which masks) and then attends layer by layer. Shape letters: T tokens,
R rows, B blocks of a table, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.config import ModelConfig
from kvrelay.model.step import StepInput

logger = logging.getLogger(__name__)


class AttentionPlan(Protocol):
    def attend(self, q_THD: Tensor, layer: int, cache: PagedKVCache) -> Tensor:
        """The attention output [T, H, D]; this step's K and V of the layer are in the cache already."""
        ...


class AttentionBackend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def reads_whole_blocks(self) -> bool:
        """It masks what is not a row's, which an earlier owner must then have left without NaN."""
        ...

    def plan(self, inp: StepInput, cache: PagedKVCache) -> AttentionPlan: ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """Can attend in a CUDA graph: what its kernels read lies in tensors that stay in place from step to step."""

    def plan_decode(self, context_lens_R: Tensor, block_table_RB: Tensor, cache: PagedKVCache) -> AttentionPlan:
        """A plan for rows of one token each; tensors are int32 and read anew whenever the plan attends."""
        ...


class BackendUnavailable(Exception):
    """This backend cannot serve this model here; the message says why."""


def choose_backend(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    """Once, when a model is loaded. What was passed over, and why, is logged."""
    if torch.device(device).type != "cuda":
        return _plain()
    for make in (_varlen, _triton):
        try:
            backend = make(device, config, dtype)
        except BackendUnavailable as reason:
            logger.info("attention: %s", reason)
        else:
            logger.info("attention: %s", backend.name)
            return backend
    logger.warning("attention: plain, many times slower than this GPU; install triton for its kernel")
    return _plain()


def _plain() -> AttentionBackend:
    from kvrelay.model.attention_plain import PlainPagedAttention

    return PlainPagedAttention()


def _varlen(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    from kvrelay.model.attention_varlen import VarlenPagedAttention

    return VarlenPagedAttention.probed(device, config, dtype)


def _triton(device: str, config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
    if find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed")
    from kvrelay.model.attention_triton import TritonPagedAttention

    return TritonPagedAttention(config)
