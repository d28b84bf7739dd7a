"""Draws the next token of each row from its logits.

The order is vLLM's: logit bias and min_tokens, then penalties, then temperature, min_p, top_k, top_p. The draw itself
is a function of (seed, position) and the row's own logits: batch neighbours, node and earlier draws have no part in it.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.errors import BadLogitsError, KVRelayError
from kvrelay.model.noise import waiting_times
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob

# Below this a draw is greedy: dividing by it would leave the likeliest token alone anyway (vLLM draws the same line).
MIN_TEMPERATURE = 1e-5
# A nucleus is looked for among so many likeliest tokens before all are sorted, which takes six times as long.
NUCLEUS_SIZE = 1024


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What decides one draw besides the logits. `params.seed` is set unless the draw is greedy."""

    params: SamplingParams
    position: int  # the index that the drawn token will have in its sequence
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: tuple[int, ...]


class Sampler:
    @torch.inference_mode()
    def sample(self, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> list[GeneratedToken | BadLogitsError]:
        """One token a row, or the error of a row whose logits are NaN or infinite: its neighbours have no part in that.

        Logits are float32 and stay as they are.
        """
        if not rows:
            return []
        largest_N, likeliest_N = logits_NV.max(-1)  # NaN wins a max, so this finds it for free
        finite, greedy_ids = largest_N.isfinite().tolist(), likeliest_N.tolist()
        return [
            _token(logits_NV[index], row, greedy_ids[index]) if finite[index] else _bad_logits(row)
            for index, row in enumerate(rows)
        ]


def _token(logits_V: Tensor, row: SamplingRow, greedy_id: int) -> GeneratedToken:
    return GeneratedToken(greedy_id) if _plainly_greedy(row) else _sample_row(logits_V, row)


def _bad_logits(row: SamplingRow) -> BadLogitsError:
    return BadLogitsError(f"the model gave NaN or infinite logits for the token at position {row.position}")


def _plainly_greedy(row: SamplingRow) -> bool:
    """The likeliest token, whatever came before, and no log-probabilities."""
    return _greedy(row.params) and row.params.logprobs is None and not _adjusts(row)


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def _adjusts(row: SamplingRow) -> bool:
    return bool(row.params.logit_bias) or _must_go_on(row) or _penalizes(row.params)


def _must_go_on(row: SamplingRow) -> bool:
    return len(row.output_ids) < row.params.min_tokens


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _sample_row(logits_V: Tensor, row: SamplingRow) -> GeneratedToken:
    adjusted_V = _adjust(logits_V, row) if _adjusts(row) else logits_V
    token_id = int(adjusted_V.argmax()) if _greedy(row.params) else _draw(adjusted_V, row)
    return GeneratedToken(token_id, _logprobs(logits_V, token_id, row.params.logprobs))


def _adjust(logits_V: Tensor, row: SamplingRow) -> Tensor:
    """A copy with bias, the min_tokens mask and penalties."""
    params = row.params
    adjusted_V = logits_V.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=adjusted_V.device)
        adjusted_V[ids] += torch.tensor(list(params.logit_bias.values()), device=adjusted_V.device)
    if _must_go_on(row):
        ending_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *row.eos_token_ids)
        adjusted_V[torch.tensor(ending_ids, dtype=torch.int64, device=adjusted_V.device)] = float("-inf")
    if _penalizes(params):
        _penalize(adjusted_V, row)
    return adjusted_V


def _penalize(logits_V: Tensor, row: SamplingRow) -> None:
    """In place. Repetition counts prompt and output, as in CTRL (arXiv 1909.05858); the other two the output only."""
    params, device = row.params, logits_V.device
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list({*row.prompt_ids, *row.output_ids}), dtype=torch.int64, device=device)
        logits = logits_V[seen]
        penalized = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits_V[seen] = penalized.clamp(max=torch.finfo(logits_V.dtype).max)  # a tiny penalty would make infinity
    if row.output_ids and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(row.output_ids)
        penalties = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
        logits_V[torch.tensor(list(counts), device=device)] -= torch.tensor(penalties, device=device)


def _draw(logits_V: Tensor, row: SamplingRow) -> int:
    params = row.params
    if params.seed is None:
        raise KVRelayError("a draw needs a seed; the coordinator sets one when the client sent none")
    # The largest becomes 0 first, so that no temperature can make an infinity.
    probabilities_V = ((logits_V - logits_V.max()) / params.temperature).softmax(-1)
    _truncate(probabilities_V, params)
    return int((probabilities_V / waiting_times(params.seed, row.position, len(logits_V), logits_V.device)).argmax())


def _truncate(probabilities_V: Tensor, params: SamplingParams) -> None:
    """Zeroes in place what min_p, top_k and top_p leave out; tokens tied with the last one kept are kept too."""
    least = params.min_p * probabilities_V.max()
    if 0 < params.top_k < len(probabilities_V):
        least = torch.maximum(least, probabilities_V.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        kept = torch.where(probabilities_V >= least, probabilities_V, 0.0)
        least = torch.maximum(least, _nucleus_least(kept, params.top_p))
    probabilities_V[probabilities_V < least] = 0.0


def _nucleus_least(probabilities_V: Tensor, top_p: float) -> Tensor:
    """The smallest probability in the smallest set of likeliest tokens that has `top_p` of all that is left."""
    wanted = top_p * probabilities_V.sum(dtype=torch.float64)
    for size in (min(NUCLEUS_SIZE, len(probabilities_V)), len(probabilities_V)):
        descending = probabilities_V.topk(size).values
        cumulated = descending.cumsum(-1, dtype=torch.float64)
        if cumulated[-1] >= wanted:
            break
    return descending[min(int(torch.searchsorted(cumulated, wanted)), size - 1)]


def _logprobs(logits_V: Tensor, token_id: int, num_top: int | None) -> StepLogprobs | None:
    """Of the model's own distribution, before anything was changed."""
    if num_top is None:
        return None
    logprobs_V = logits_V.log_softmax(-1)
    top = logprobs_V.topk(min(num_top, len(logprobs_V)))
    return StepLogprobs(
        chosen=TokenLogprob(token_id, float(logprobs_V[token_id])),
        top=tuple(TokenLogprob(*pair) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
