"""Rotary position embeddings in Llama's half-split form, with linear and llama3 frequency scaling.

Shape letters: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvrelay.model.config import ModelConfig, RopeScaling


class RotaryTable:
    """cos and signed sin of every position, [max_model_len, 1, D], in the model's dtype, built once."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: str = "cpu", divisors: Tensor | None = None
    ) -> None:
        """`divisors` [D/2] divide the frequencies (a GGUF file carries llama3 scaling in this form)."""
        cos, sin = cos_and_sin(config, divisors)
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device, dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for `rotate`, each [T, 1, D]; once a step."""
        return self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotates each head's (i, i + D/2) pairs; returns a new contiguous tensor."""
    half = x_THD.shape[-1] // 2
    rotated = x_THD * cos_T1D
    rotated[..., :half].addcmul_(x_THD[..., half:], sin_T1D[..., :half])
    rotated[..., half:].addcmul_(x_THD[..., :half], sin_T1D[..., half:])
    return rotated


def cos_and_sin(config: ModelConfig, divisors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of every position and pair, float32 [max_model_len, D/2]; `divisors` as for RotaryTable."""
    frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = torch.outer(torch.arange(config.max_model_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair, float32 [D/2], computed in float32 as the models were trained with."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    return _llama3(inverse, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / inverse
    blend = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse
