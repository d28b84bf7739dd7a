"""How a preempted sequence gets its KV back: computed again, or loaded from the kvstore. Pure.

Both ways start from what the node's own cache still has, and both are measured here, in seconds a block. The cheaper
one is taken; every so often the other is, so that what is known of it does not grow old.
"""

from __future__ import annotations

from enum import Enum

from kvrelay.kv.layout import KVLayout

SMOOTHING = 0.3  # weight of the latest measurement
TRY_OTHER_EVERY = 32  # preemptions
PROMPT_TOKENS_A_ROW = 4  # a step of fewer tokens a row tells more of decoding than of computing prompts


class Resume(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"


class ResumeCosts:
    """Belongs to the engine thread."""

    def __init__(self, layout: KVLayout, *, with_store: bool) -> None:
        self._block_tokens = layout.block_tokens
        self._with_store = with_store
        self._num_choices = 0
        self._compute_s: float | None = None  # a block, as the next one; None before the first measurement
        self._load_s: float | None = None

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step took `seconds`; one with chunks of prompts in it says what computing a block costs."""
        if num_tokens >= PROMPT_TOKENS_A_ROW * max(1, num_rows):
            self._compute_s = _smooth(self._compute_s, seconds / num_tokens * self._block_tokens)

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """`num_blocks` came from the store in `seconds`; none at all is a whole wait for nothing."""
        self._load_s = _smooth(self._load_s, seconds / num_blocks if num_blocks else float("inf"))

    def choose(self) -> Resume:
        """For a sequence that is preempted now."""
        if not self._with_store or self._compute_s is None:
            return Resume.RECOMPUTE
        if self._load_s is None:
            return Resume.SWAP
        self._num_choices += 1
        loads = (self._load_s < self._compute_s) != (self._num_choices % TRY_OTHER_EVERY == 0)
        return Resume.SWAP if loads else Resume.RECOMPUTE


def _smooth(before: float | None, latest: float) -> float:
    """After an infinite one the next finite measurement starts afresh."""
    if before is None or before == float("inf") or latest == float("inf"):
        return latest
    return before + SMOOTHING * (latest - before)
