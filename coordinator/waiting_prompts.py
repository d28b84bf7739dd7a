"""What a new prompt stands behind on a prefill node, by the order in which the node computes. Pure.

A node computes short prompts first, and gives the oldest a quarter of every step. Steps are filled up with whatever
waits, so a prompt's first token comes at the end of a step that is full while others have work left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

OLDEST_SHARE = 0.25  # of each step, for the oldest prompt
# Of a step: a prompt of no more is short, and there are as many places again for those.
SHORT_SHARE = 1.0 - OLDEST_SHARE


class WaitingPrompts:
    """Uncomputed tokens of each prompt on one node, oldest first."""

    __slots__ = ("_answered", "_oldest", "_sorted", "_sums")

    def __init__(self, num_tokens: Sequence[float]) -> None:
        self._oldest = num_tokens[0] if num_tokens else 0.0
        self._sorted = sorted(num_tokens)
        self._sums = list(accumulate(self._sorted, initial=0.0))
        # What `before` was asked last, and said: each node is looked at several times for one prompt.
        self._answered = ((0.0, 0, 0), 0.0)

    def before(self, num_tokens: float, step_tokens: int, max_prefills: int) -> float:
        """Tokens that are computed before the last of `num_tokens` new ones, besides them, where a step has at most
        `step_tokens` and there are `max_prefills` places, and as many for short prompts."""
        asked = (num_tokens, step_tokens, max_prefills)
        if self._answered[0] != asked:
            self._answered = asked, self._before(*asked)
        return self._answered[1]

    def _before(self, num_tokens: float, step_tokens: int, max_prefills: int) -> float:
        total = self._sums[-1]
        num_first = max(bisect_right(self._sorted, num_tokens), self._num_first(num_tokens, step_tokens, max_prefills))
        ahead, own = self._with_oldest(self._sums[num_first], num_tokens)
        under_way = min(step_tokens, total)  # half of which is done when the new one comes
        num_steps = -(-(max(0.0, ahead - under_way) + own) // step_tokens)
        return under_way / 2 + min(num_steps * step_tokens, total - under_way + num_tokens) - num_tokens

    def each(self, num_tokens: float) -> float:
        """Tokens for which somebody waits when `num_tokens` come: of any two prompts the longer waits while the shorter
        is computed."""
        num_short = bisect_right(self._sorted, num_tokens)
        return self._sums[num_short] + num_tokens * (len(self._sorted) - num_short)

    def _num_first(self, num_tokens: float, step_tokens: int, max_prefills: int) -> int:
        """Prompts that have to end before there is a place for the new one: the shortest do."""
        num_places = max_prefills * (2 if num_tokens <= SHORT_SHARE * step_tokens else 1)
        return max(0, len(self._sorted) - num_places + 1)

    def _with_oldest(self, first: float, num_tokens: float) -> tuple[float, float]:
        """Tokens up to when the new one's turn comes, `first` of them of shorter ones, and from then on."""
        if self._oldest <= num_tokens:
            return first, num_tokens
        share = OLDEST_SHARE / SHORT_SHARE
        if self._oldest - first * share <= num_tokens:  # it is the shorter one by then
            return first + self._oldest, num_tokens
        return first * (1 + share), num_tokens + min(self._oldest, num_tokens * share)
