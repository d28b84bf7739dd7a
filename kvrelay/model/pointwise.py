"""What a decoder does between its matrix products, and which implementation a device gets.

On a GPU each of torch's small operations reads and writes memory and costs a launch: a decode step of a large model has
hundreds, which take as long as a third of its matrix products. There each method here is one kernel.

Shape letters: T tokens, C hidden size, I inner size of the MLP, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.rotary import rotate

logger = logging.getLogger(__name__)


class Pointwise(Protocol):
    def add_and_normalize(self, x_TC: Tensor, delta_TC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        """Adds `delta_TC` to the float32 residual stream in place; returns its RMS norm in the model's dtype."""
        ...

    def rotate_and_store(
        self, qkv: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, cache: PagedKVCache, layer: int, cache_rows_T: Tensor
    ) -> Tensor:
        """Takes [T, (H + 2 K) * D]; puts rotated K, and V, into the cache and returns rotated Q, [T, H, D]."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half, times the second: [T, 2 * I] to [T, I]."""
        ...


def choose_pointwise(device: str, dtype: torch.dtype) -> Pointwise:
    """Once, when a model is loaded."""
    if torch.device(device).type == "cuda":
        if find_spec("triton") is not None:
            from kvrelay.model.pointwise_triton import TritonPointwise

            return TritonPointwise(dtype)
        logger.warning("triton is not installed: norms, rotary embeddings and gates run as torch's own small kernels")
    return TorchPointwise(dtype)


class TorchPointwise:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def add_and_normalize(self, x_TC: Tensor, delta_TC: Tensor | None, weight_C: Tensor, epsilon: float) -> Tensor:
        if delta_TC is not None:
            x_TC += delta_TC
        return F.rms_norm(x_TC, weight_C.shape, weight_C, epsilon).to(self._dtype)

    def rotate_and_store(
        self, qkv: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, cache: PagedKVCache, layer: int, cache_rows_T: Tensor
    ) -> Tensor:
        num_kv_heads, head_dim = cache.layout.num_kv_heads, cache.layout.head_dim
        heads = qkv.view(len(qkv), -1, head_dim)
        qk_THD, v_TKD = heads.tensor_split((heads.shape[1] - num_kv_heads,), 1)
        q_THD, k_TKD = rotate(qk_THD, cos_T1D, sin_T1D).tensor_split((qk_THD.shape[1] - num_kv_heads,), 1)
        cache.store(layer, cache_rows_T, k_TKD, v_TKD)
        return q_THD

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
