"""Attention of a step's queries over the paged KV cache: what a backend is. `attention_choice` says which one serves.

A backend plans a step once (which blocks, which masks) and then attends layer by layer. Shape letters: T tokens,
R rows, B blocks of a table, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.step import StepInput


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
