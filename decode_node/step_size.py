"""How many sequences a step may have and how many tokens of prompts beside them, against the time between two tokens.

Pure. Both are within the node's limits. Tokens of prompts that are computed here are what a step can do without: they
give way first, to newcomers that wait for too long and to an inter-token time above the target. Without a target it is
the high mark: who runs beside a prompt waits for the step as a newcomer does. Only a step without any tells how many
sequences are too many.
"""

from __future__ import annotations

from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.limits import MAX_BATCHED_TOKENS, DecodeLimits, QueueMarks

LEAST_TAIL_TOKENS = 16  # so that a prompt which is computed here goes on
LEAST_LEFT = 0.25  # of a slow step's tokens of prompts, to the next one: a step may be slow for other reasons
HEADROOM = 0.8  # of the target, under which one sequence more is let in


class DecodeStepSize:
    """Without `marks` no wait makes a step shorter, without `itl_target_s` nothing that it takes does; without both it
    has what the limits say."""

    def __init__(self, marks: QueueMarks | None = None, itl_target_s: float = 0.0) -> None:
        marks_or_any = marks or QueueMarks()
        self._hears_waits = marks is not None
        self._is_fixed = marks is None and not itl_target_s
        self._itl_target_s = itl_target_s
        self._most_beside_s = itl_target_s or (marks.high_s if marks else 0.0)  # of a step with tokens of prompts
        self._prompt_token_s = 0.0  # that a token of a prompt takes, as measured; 0: not yet
        self._rows_s = 0.0  # that the last step's sequences take without any
        self._rows = AdaptiveBound(marks_or_any)
        self._tail_tokens = AdaptiveBound(marks_or_any, LEAST_TAIL_TOKENS)

    def measured(self, prompt_token_s: float, rows_s: float) -> None:
        """What a token of a prompt takes, and a step of the sequences that run now without any; 0: not known."""
        self._prompt_token_s, self._rows_s = prompt_token_s, rows_s

    def max_rows(self, limits: DecodeLimits) -> int:
        """Sequences up to which others may join; those that run stay."""
        return limits.max_batch if self._is_fixed else self._rows.of(limits.max_batch)

    def max_tail_tokens(self, limits: DecodeLimits, num_rows: int, itl_target_s: float = 0.0) -> int:
        """Tokens of prompts beside one of each of `num_rows` sequences, one of which is to have its next token within
        `itl_target_s` (0: none says so). There is room for a few, however short that is."""
        left = limits.max_batched_tokens - num_rows
        if itl_target_s:
            left = min(left, self._num_in(itl_target_s - self._rows_s))
        if self._is_fixed:
            return left
        if num_rows > 1 and self._most_beside_s:
            left = min(left, self._num_in(self._most_beside_s))
        return min(left, self._tail_tokens.of(limits.max_batched_tokens))

    def _num_in(self, seconds: float) -> int:
        """Tokens of prompts that take so long, and at least a few; all while it is not known what one takes."""
        if not self._prompt_token_s:
            return MAX_BATCHED_TOKENS
        return max(LEAST_TAIL_TOKENS, int(seconds / self._prompt_token_s))

    def waited(self, seconds: float) -> None:
        """A sequence that came during a step could join the next after so long."""
        if self._hears_waits:
            self._tail_tokens.waited(seconds)

    def stepped(self, limits: DecodeLimits, num_rows: int, num_tokens: int, step_s: float, *, num_waiting: int) -> None:
        """A step computed `num_tokens` for `num_rows` sequences; `num_waiting` could not join it."""
        if self._is_fixed:
            return
        num_tail_tokens = num_tokens - num_rows
        if num_tail_tokens:
            self._stepped_beside(limits, num_rows, num_tail_tokens, step_s)
        elif self._itl_target_s and step_s > self._itl_target_s and num_rows > 1:
            self._rows.shrink_below(num_rows, limits.max_batch)
        elif num_waiting and num_rows >= self.max_rows(limits) and step_s < HEADROOM * self._itl_target_s:
            self._rows.grow()

    def _stepped_beside(self, limits: DecodeLimits, num_rows: int, num_tail_tokens: int, step_s: float) -> None:
        """A step had tokens of prompts."""
        if step_s > self._most_beside_s > 0 and num_rows > 1:
            left = num_tail_tokens * max(self._most_beside_s / step_s, LEAST_LEFT)
            self._tail_tokens.shrink_below(int(left), limits.max_batched_tokens)
        else:
            self._tail_tokens.stepped(is_full=num_tail_tokens >= self.max_tail_tokens(limits, num_rows))
