"""What the weight readers give, whatever the file format: tensors in float32 under Hugging Face's Llama names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.model.config import ModelConfig

Quantization = Literal["Q4_1", "Q8_0"]
WeightForms = Literal["file", "dtype", "both"]  # in which the matrices of a quantised file are kept


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix as GGUF packs it, 32 inputs to a block: uint8 [outputs, bytes of a row]."""

    kind: Quantization
    rows: Tensor


class WeightSource(Protocol):
    config: ModelConfig

    def tensor(self, name: str) -> Tensor:
        """A float32 tensor on the CPU, rows of q and k in half-split rotary order. ModelFileError if it is missing."""
        ...

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """The same matrix as the file has it, or None if it is of no kind that can be computed with directly."""
        ...

    def rope_divisors(self) -> Tensor | None:
        """Float32 [head_dim / 2] by which rotary frequencies are divided on top of the config's scaling, if any."""
        ...


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != expected:
        raise ModelFileError(f"tensor {name} has shape {list(tensor.shape)}; the config says {list(expected)}")
    return tensor
