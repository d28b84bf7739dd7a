"""What the weight readers give, whatever the file format: tensors in float32 under Hugging Face's Llama names."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.model.config import ModelConfig


class WeightSource(Protocol):
    config: ModelConfig

    def tensor(self, name: str) -> Tensor:
        """A float32 tensor on the CPU, rows of q and k in half-split rotary order. ModelFileError if it is missing."""
        ...

    def rope_divisors(self) -> Tensor | None:
        """Float32 [head_dim / 2] by which rotary frequencies are divided on top of the config's scaling, if any."""
        ...


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != expected:
        raise ModelFileError(f"tensor {name} has shape {list(tensor.shape)}; the config says {list(expected)}")
    return tensor
