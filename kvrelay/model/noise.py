"""The noise of a draw: one number per token, decided by (seed, position, token) alone, the same on every machine.

Each token runs its own clock (exponential race, the Gumbel-max trick without logarithms of probabilities): the first
to ring is drawn with its softmax probability. A small error in the logits, such as another batch's rounding, moves
only the draws whose two fastest clocks nearly tie, whereas a walk along cumulated probabilities would shift as a whole.

Shape letters: D draws, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014); int64 wraps around as it does.
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 under 1: no clock runs for ever


def noise_key(seed: int, position: int) -> int:
    """What a draw's noise starts from, an int64."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"kvrelay-draw-v2").digest()
    return _signed(int.from_bytes(digest, "little"))


def waiting_times(keys_D1: Tensor, num_tokens: int) -> Tensor:
    """Exponentially distributed with mean 1, above 0, float32 [D, V]; `keys_D1` are int64 `noise_key`s."""
    mixed = _steps(num_tokens, keys_D1.device) + keys_D1
    mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
    mixed ^= _shift_right(mixed, 31)
    uniform = (_shift_right(mixed, 11).double() + 0.5).mul_(2.0**-53).float().clamp_(max=_ALMOST_ONE)
    return uniform.neg_().log1p_().neg_()


@lru_cache(maxsize=8)
def _steps(num_tokens: int, device: torch.device) -> Tensor:
    return torch.arange(1, num_tokens + 1, dtype=torch.int64, device=device) * _STEP


def _shift_right(values: Tensor, num_bits: int) -> Tensor:
    """Of the 64 bits as they are: zeros come in from the left."""
    return (values >> num_bits) & ((1 << (64 - num_bits)) - 1)
