"""Draws one token for each of several rows at once, on whatever device their logits are, without asking it anything.

Shape letters: D draws, V vocabulary, S the likeliest tokens that are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrelay.errors import KVRelayError
from kvrelay.model.noise import noise_key, waiting_times
from kvrelay.model.transfer import on_device
from kvrelay.sampling import SamplingParams

DEVICE_DRAW_SIZE = 2**22  # rows times vocabulary drawn at once: fills a GPU, 32 MiB for each of a few temporaries


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Of D rows; tensors are on the device."""

    keys_D1: Tensor  # int64, of the noise
    temperature_D1: Tensor
    min_p_D1: Tensor
    top_k_D1: Tensor  # int64; 0 keeps all
    top_p_D1: Tensor  # float64
    truncates: bool  # some row has min_p, top_k or top_p
    most_top_k: int
    any_top_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int], like_DV: Tensor) -> DrawSettings:
        """`positions` are those the drawn tokens will have. Raises KVRelayError for a row without a seed."""
        device, vocab_size = like_DV.device, like_DV.shape[-1]
        seeds = [p.seed for p in params if p.seed is not None]
        if len(seeds) < len(params):
            raise KVRelayError("a draw needs a seed; the coordinator sets one when the client sent none")
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return on_device(values, dtype, device).unsqueeze(1)

        return cls(
            keys_D1=column([noise_key(*pair) for pair in zip(seeds, positions, strict=True)], torch.int64),
            temperature_D1=column([p.temperature for p in params], torch.float32),
            min_p_D1=column([p.min_p for p in params], torch.float32),
            top_k_D1=column(top_k, torch.int64),
            top_p_D1=column([p.top_p for p in params], torch.float64),
            truncates=any(top_k) or any(p.min_p > 0.0 or p.top_p < 1.0 for p in params),
            most_top_k=max(top_k),
            any_top_p=any(p.top_p < 1.0 for p in params),
        )

    def of_rows(self, rows: slice) -> DrawSettings:
        return replace(
            self,
            keys_D1=self.keys_D1[rows],
            temperature_D1=self.temperature_D1[rows],
            min_p_D1=self.min_p_D1[rows],
            top_k_D1=self.top_k_D1[rows],
            top_p_D1=self.top_p_D1[rows],
        )


def draw(logits_DV: Tensor, settings: DrawSettings, nucleus_size: int) -> tuple[Tensor, Tensor]:
    """Token ids [D], and whether each row's nucleus lay within its `nucleus_size` likeliest tokens; if not, repeat."""
    at_once = rows_at_once(logits_DV)
    parts = [
        _draw(logits_DV[rows], settings.of_rows(rows), nucleus_size)
        for rows in (slice(start, start + at_once) for start in range(0, len(logits_DV), at_once))
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([token_ids for token_ids, _ in parts]), torch.cat([found for _, found in parts])


def rows_at_once(logits_DV: Tensor) -> int:
    """One on a CPU, whose cache holds one row's noise (64 bits a token) and not several."""
    return max(1, DEVICE_DRAW_SIZE // logits_DV.shape[-1]) if logits_DV.is_cuda else 1


def _draw(logits_DV: Tensor, settings: DrawSettings, nucleus_size: int) -> tuple[Tensor, Tensor]:
    # The largest becomes 0 first, so that no temperature can make an infinity.
    probabilities_DV = ((logits_DV - logits_DV.amax(-1, keepdim=True)) / settings.temperature_D1).softmax(-1)
    found_D = torch.ones(len(logits_DV), dtype=torch.bool, device=logits_DV.device)
    if settings.truncates:
        least_D1, found_D = _least_kept(probabilities_DV, settings, nucleus_size)
        probabilities_DV.masked_fill_(probabilities_DV < least_D1, 0.0)
    return (probabilities_DV / waiting_times(settings.keys_D1, logits_DV.shape[-1])).argmax(-1), found_D


def _least_kept(probabilities_DV: Tensor, settings: DrawSettings, nucleus_size: int) -> tuple[Tensor, Tensor]:
    """The smallest probability that min_p, top_k and top_p keep; tokens tied with the last one kept are kept too."""
    size = max(1, settings.most_top_k, nucleus_size if settings.any_top_p else 0)
    descending_DS = probabilities_DV.topk(min(size, probabilities_DV.shape[-1])).values
    least_D1 = settings.min_p_D1 * descending_DS[:, :1]
    last_D1 = descending_DS.gather(1, (settings.top_k_D1 - 1).clamp(min=0))
    least_D1 = torch.where(settings.top_k_D1 > 0, torch.maximum(least_D1, last_D1), least_D1)
    if not settings.any_top_p:
        return least_D1, torch.ones_like(least_D1[:, 0], dtype=torch.bool)
    nucleus_D1, found_D1 = _least_in_nucleus(probabilities_DV, descending_DS, least_D1, settings.top_p_D1)
    narrows_D1 = settings.top_p_D1 < 1.0
    least_D1 = torch.where(narrows_D1, torch.maximum(least_D1, nucleus_D1), least_D1)
    return least_D1, (found_D1 | ~narrows_D1).squeeze(1)


def _least_in_nucleus(
    probabilities_DV: Tensor, descending_DS: Tensor, least_D1: Tensor, top_p_D1: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest probability in the smallest set of likeliest tokens that has top_p of all that `least_D1` leaves.

    The second says whether that set was found among the S likeliest.
    """
    kept_DV = torch.where(probabilities_DV >= least_D1, probabilities_DV, 0.0)
    wanted_D1 = top_p_D1 * kept_DV.sum(-1, keepdim=True, dtype=torch.float64)
    cumulated_DS = torch.where(descending_DS >= least_D1, descending_DS, 0.0).cumsum(-1, dtype=torch.float64)
    size, vocab_size = descending_DS.shape[-1], probabilities_DV.shape[-1]
    last_D1 = torch.searchsorted(cumulated_DS, wanted_D1).clamp(max=size - 1)
    found_D1 = torch.ones_like(wanted_D1, dtype=torch.bool) if size == vocab_size else cumulated_DS[:, -1:] >= wanted_D1
    return descending_DS.gather(1, last_D1), found_D1
