"""How fast this node decodes and computes prompts, step by step. Pure; belongs to the engine thread."""

from __future__ import annotations

from kvrelay.cluster import NodeRates
from kvrelay.rates import HALF_BYTES, HALF_TOKENS, Line, WorkRate

MIN_SHARE = 0.1  # of a step's time that prompts in it take at least: a step may be quicker than the line says


class DecodeRates:
    """A step of sequences that advance by one token each takes base + slope x sequences; what one with prompts in it
    takes beyond that is what the prompts' tokens take."""

    def __init__(self, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._step = Line()
        self._prompts = WorkRate(HALF_TOKENS)
        self._store = WorkRate(HALF_BYTES)

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of `num_rows` sequences, with `num_tokens` tokens in all."""
        if num_rows == 0:
            return
        num_more = num_tokens - num_rows
        if num_more <= 0:
            self._step.add(num_rows, seconds)
        else:
            self._prompts.add(num_more, max(seconds - self._step.at(num_rows), MIN_SHARE * seconds))

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """So many blocks came from kvstores."""
        self._store.add(num_blocks * self._slab_bytes, seconds)

    @property
    def prompt_token_s(self) -> float:
        """0 while it is not measured."""
        per_s = self._prompts.per_s
        return 1.0 / per_s if per_s > 0 else 0.0

    def rows_s(self, num_rows: int) -> float:
        """A step of so many sequences without any prompts; 0 while none was."""
        return self._step.at(num_rows)

    def rates(self) -> NodeRates:
        return NodeRates(
            prefill_tokens_per_s=self._prompts.per_s,
            store_bytes_per_s=self._store.per_s,
            step_s=self._step.base,
            step_row_s=self._step.slope,
        )
