"""What changes a row's logits before its token is drawn: bias, what its answer is held to, the bar on ending early,
penalties. V vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.model.masks import bar, without
from kvrelay.model.transfer import on_device
from kvrelay.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What decides one draw besides the logits. `params.seed` is set unless the draw is greedy."""

    params: SamplingParams
    position: int  # the index that the drawn token will have in its sequence
    token_ids: Sequence[int]  # prompt and output so far, the sequence's own: read when the draw is queued, never later
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...]
    mask: bytes | None = None  # a bit for each token id that may follow, lowest first; None: all may

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]


def adjusts(row: SamplingRow) -> bool:
    return bool(row.params.logit_bias) or row.mask is not None or _must_go_on(row) or _penalizes(row.params)


def adjust(logits_V: Tensor, row: SamplingRow) -> None:
    """In place. Ids and numbers go to the device without a wait, so a row with them costs its neighbours nothing."""
    params = row.params
    if params.logit_bias:
        bias = _floats(logits_V, list(params.logit_bias.values()))
        logits_V.index_add_(0, _ids(logits_V, list(params.logit_bias)), bias)
    if row.mask is not None:
        bar(logits_V, without(row.mask, _held_back(row)))
    elif _must_go_on(row):
        ending_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *row.eos_token_ids)
        logits_V.index_fill_(0, _ids(logits_V, ending_ids), float("-inf"))
    if _penalizes(params):
        _penalize(logits_V, row)


def _must_go_on(row: SamplingRow) -> bool:
    return row.num_output_tokens < row.params.min_tokens


def _held_back(row: SamplingRow) -> list[int]:
    """Ends of an answer that is held to something, to be drawn only where nothing else may follow."""
    stops = row.params.stop_token_ids if _must_go_on(row) else ()
    ends = row.eos_token_ids if row.params.ignore_eos or _must_go_on(row) else ()
    return [*stops, *ends]


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _penalize(logits_V: Tensor, row: SamplingRow) -> None:
    """Repetition counts prompt and output, as in CTRL (arXiv 1909.05858); the other two the output only."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _ids(logits_V, list(set(row.token_ids)))
        logits = logits_V.index_select(0, seen)
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        penalized.clamp_(max=torch.finfo(logits_V.dtype).max)  # a tiny penalty would make infinity
        logits_V.index_copy_(0, seen, penalized)
    if row.num_output_tokens and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(row.output_ids)
        penalties = [-(params.frequency_penalty * count + params.presence_penalty) for count in counts.values()]
        logits_V.index_add_(0, _ids(logits_V, list(counts)), _floats(logits_V, penalties))


def _ids(logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
    return on_device(token_ids, torch.int64, logits_V.device)


def _floats(logits_V: Tensor, values: Sequence[float]) -> Tensor:
    return on_device(values, logits_V.dtype, logits_V.device)
