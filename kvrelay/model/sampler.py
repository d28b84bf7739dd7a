"""Draws the next token of each row from its logits.

The order is vLLM's: logit bias, what the answer is held to and min_tokens, then penalties, then temperature, min_p,
top_k, top_p. The draw itself is a function of (seed, position) and the row's own logits: batch neighbours, node and
earlier draws have no part in it.

All rows are drawn on the logits' device and reach the host as one table: one wait a step.
Shape letters: N rows, V vocabulary, P rows that change or draw, L rows with log-probabilities, W columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.errors import BadLogitsError
from kvrelay.model.adjust import SamplingRow as SamplingRow
from kvrelay.model.adjust import adjust, adjusts
from kvrelay.model.draw import DrawSettings, draw
from kvrelay.model.likeliest import likeliest
from kvrelay.model.transfer import Arrival, on_device
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob

# Below this a draw is greedy: dividing by it would leave the likeliest token alone anyway (vLLM draws the same line).
MIN_TEMPERATURE = 1e-5
# A nucleus is looked for among so many likeliest tokens before all are sorted, which takes several times as long.
NUCLEUS_SIZE = 1024


class Sampler:
    @torch.inference_mode()
    def launch(self, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> PendingTokens:
        """Queues the draws. Logits are float32, stay as they are, and may be overwritten by what is queued later."""
        work = _Work.of(logits_NV, rows)
        return PendingTokens(rows, work, Arrival(work.table_NW(NUCLEUS_SIZE)))

    def sample(self, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> list[GeneratedToken | BadLogitsError]:
        """`launch` and its result."""
        return self.launch(logits_NV, rows).result()


class PendingTokens:
    """Tokens that the device may still be drawing."""

    def __init__(self, rows: Sequence[SamplingRow], work: _Work, table_NW: Arrival) -> None:
        self._rows = rows
        self._work = work
        self._table_NW = table_NW

    @torch.inference_mode()
    def result(self) -> list[GeneratedToken | BadLogitsError]:
        """One token a row, or the error of a row whose logits are NaN or infinite: its neighbours have no part in that.

        Waits for the device, once unless a nucleus reached beyond NUCLEUS_SIZE tokens: then all is sorted after all.
        """
        lines = self._table_NW.wait().tolist()
        if any(finite and not found for finite, found, *_ in lines):
            lines = Arrival(self._work.table_NW(self._work.vocab_size)).wait().tolist()
        return [_token(row, line) for row, line in zip(self._rows, lines, strict=True)]


def _token(row: SamplingRow, line: Sequence[float]) -> GeneratedToken | BadLogitsError:
    finite, _, token_id, *logprobs = line
    if not finite:
        return BadLogitsError(f"the model gave NaN or infinite logits for the token at position {row.position}")
    return GeneratedToken(int(token_id), _step_logprobs(int(token_id), row.params.logprobs, logprobs))


def _step_logprobs(token_id: int, wanted: int | None, columns: Sequence[float]) -> StepLogprobs | None:
    """From a row's columns: the drawn token's, then the ids of the likeliest, then theirs."""
    if wanted is None:
        return None
    chosen, *top = columns
    ids, logprobs = top[: len(top) // 2], top[len(top) // 2 :]
    pairs = list(zip(map(int, ids), logprobs, strict=True))
    return StepLogprobs(TokenLogprob(token_id, chosen), tuple(TokenLogprob(*pair) for pair in pairs[:wanted]))


def _greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything a step's draws are made from, in tensors of its own: they can be made again."""

    vocab_size: int
    finite_N: Tensor
    likeliest_N: Tensor
    draws: _Draws | None
    logprobs: _Logprobs | None

    @classmethod
    def of(cls, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> _Work:
        if not rows:  # `max` refuses an empty tensor of no columns, and a step without draws may have no logits
            nothing = torch.empty(0, device=logits_NV.device)
            return cls(logits_NV.shape[-1], nothing, nothing, None, None)
        largest_N, likeliest_N = likeliest(logits_NV)  # which is NaN where one is, so this finds it for free
        return cls(
            vocab_size=logits_NV.shape[-1],
            finite_N=largest_N.isfinite(),
            likeliest_N=likeliest_N,
            draws=_Draws.of(logits_NV, rows),
            logprobs=_Logprobs.of(logits_NV, rows),
        )

    def table_NW(self, nucleus_size: int) -> Tensor:
        """float64, which holds ids and float32 alike: finite, nucleus found, token id; then of log-probabilities."""
        token_ids_N, found_N = self.likeliest_N, torch.ones_like(self.finite_N)
        if self.draws is not None:
            token_ids_N, found_N = self.draws.into(token_ids_N, found_N, nucleus_size)
        table_NW = torch.stack((self.finite_N.double(), found_N.double(), token_ids_N.double()), 1)
        if self.logprobs is not None:
            table_NW = torch.cat((table_NW, self.logprobs.columns(token_ids_N)), 1)
        return table_NW


@dataclass(frozen=True, slots=True)
class _Draws:
    """The rows that do not simply take the likeliest token of the logits as they are."""

    rows_P: Tensor
    logits_PV: Tensor  # adjusted
    drawing_D: Tensor  # indices into P of those that are not greedy
    settings: DrawSettings | None  # of these

    @classmethod
    def of(cls, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> _Draws | None:
        special = [index for index, row in enumerate(rows) if not _greedy(row.params) or adjusts(row)]
        if not special:
            return None
        rows_P = on_device(special, torch.int64, logits_NV.device)
        logits_PV = logits_NV.index_select(0, rows_P)
        for logits_V, index in zip(logits_PV, special, strict=True):
            if adjusts(rows[index]):
                adjust(logits_V, rows[index])
        drawing = [place for place, index in enumerate(special) if not _greedy(rows[index].params)]
        drawn = [rows[special[place]] for place in drawing]
        settings = DrawSettings.of([r.params for r in drawn], [r.position for r in drawn], logits_PV) if drawn else None
        return cls(rows_P, logits_PV, on_device(drawing, torch.int64, logits_NV.device), settings)

    def into(self, token_ids_N: Tensor, found_N: Tensor, nucleus_size: int) -> tuple[Tensor, Tensor]:
        """The same with this's rows drawn."""
        token_ids_P = self.logits_PV.argmax(-1)
        if self.settings is not None:
            logits_DV = self.logits_PV
            if len(self.drawing_D) < len(self.rows_P):
                logits_DV = logits_DV.index_select(0, self.drawing_D)
            token_ids_D, found_D = draw(logits_DV, self.settings, nucleus_size)
            token_ids_P = token_ids_P.index_copy(0, self.drawing_D, token_ids_D)
            found_N = found_N.index_copy(0, self.rows_P.index_select(0, self.drawing_D), found_D)
        return token_ids_N.index_copy(0, self.rows_P, token_ids_P), found_N


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of the model's own distribution, before anything was changed."""

    rows_L: Tensor
    logprobs_LV: Tensor
    num_top: int  # the most that a row wants

    @classmethod
    def of(cls, logits_NV: Tensor, rows: Sequence[SamplingRow]) -> _Logprobs | None:
        wanted = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
        if not wanted:
            return None
        rows_L = on_device(list(wanted), torch.int64, logits_NV.device)
        num_top = min(max(wanted.values()), logits_NV.shape[-1])
        return cls(rows_L, logits_NV.index_select(0, rows_L).log_softmax(-1), num_top)

    def columns(self, token_ids_N: Tensor) -> Tensor:
        """[N, 1 + 2 * num_top]: the drawn token's, the likeliest ids, theirs; zeros for rows that want none."""
        chosen_L1 = self.logprobs_LV.gather(1, token_ids_N.index_select(0, self.rows_L).unsqueeze(1))
        top = self.logprobs_LV.topk(self.num_top)
        columns = torch.cat((chosen_L1.double(), top.indices.double(), top.values.double()), 1)
        return columns.new_zeros(len(token_ids_N), columns.shape[1]).index_copy(0, self.rows_L, columns)
