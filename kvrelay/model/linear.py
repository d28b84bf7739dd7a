"""Linear layers without bias, in the form that is fastest for the device: y_TO = x_TI @ weight_OI^T."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_BATCH = 16  # rows oneDNN packs for; the packing serves every other count as well (measured 1 to 512)

_PACKING_OPERATORS = (
    "_reorder_linear_weight",
    "_linear_pointwise",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
)


class Linear(Protocol):
    def __call__(self, x_TI: Tensor) -> Tensor: ...


class PlainLinear:
    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight_OI)


class PackedLinear:
    """oneDNN weights reordered once instead of at every call: up to twice as fast at small batches on a CPU."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_BATCH)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._linear(x_TI, self._packed, None, "none", [], "")  # type: ignore[no-any-return]


def make_linear(weight_OI: Tensor) -> Linear:
    return PackedLinear(weight_OI) if _can_pack(weight_OI) else PlainLinear(weight_OI)


def _can_pack(weight_OI: Tensor) -> bool:
    """The packing operators are torch's own, used by its inductor, but not public: probed, never presumed."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators = torch.ops.mkldnn
    if not all(hasattr(operators, name) for name in _PACKING_OPERATORS):
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    if weight_OI.dtype == torch.float16:
        return bool(operators._is_mkldnn_fp16_supported())
    return weight_OI.dtype == torch.float32
