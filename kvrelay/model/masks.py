"""Which tokens a row may draw when its answer is held to something. V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvrelay.model.transfer import on_device


def without(mask: bytes, token_ids: Iterable[int]) -> bytes:
    """`mask`, a bit for each token id, with these ids barred; as it is if nothing else would be left."""
    left = bytearray(mask)
    for token_id in token_ids:
        if token_id < 8 * len(left):
            left[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(left) if any(left) else mask


def bar(logits_V: Tensor, mask: bytes) -> None:
    """In place: what the mask does not allow, or has no bit for, becomes impossible."""
    vocab_size = len(logits_V)
    allowed_V = np.zeros(vocab_size, dtype=np.bool_)
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=min(vocab_size, 8 * len(mask)), bitorder="little")
    allowed_V[: len(bits)] = bits
    logits_V.masked_fill_(~on_device(allowed_V, torch.bool, logits_V.device), float("-inf"))
