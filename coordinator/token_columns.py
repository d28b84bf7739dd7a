"""Generated tokens in columns: a few bytes each, where objects would take a hundred and more. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob

TOKEN_BYTES = 4
LOGPROB_BYTES = 5  # a float32, as on the wire, and how many top ones there are
TOP_BYTES = 8


class TokenColumns:
    """Tokens of one answer: all of them with log-probabilities or none."""

    __slots__ = ("_chosen", "_ids", "_num_top", "_top_ids", "_top_logprobs")

    def __init__(self) -> None:
        self._ids = array("I")
        self._chosen = array("f")
        self._num_top = array("B")
        self._top_ids = array("I")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, tokens: Iterable[GeneratedToken]) -> None:
        for token in tokens:
            self._ids.append(token.token_id)
            if token.logprobs is not None:
                self._add(token.logprobs)

    def since(self, start: int) -> tuple[GeneratedToken, ...]:
        """Those from number `start` on."""
        ids = self._ids[start:]
        if not self._chosen:
            return tuple(map(GeneratedToken, ids))
        at, tokens = sum(self._num_top[:start]), []
        for token_id, chosen, num_top in zip(ids, self._chosen[start:], self._num_top[start:], strict=True):
            columns = zip(self._top_ids[at : at + num_top], self._top_logprobs[at : at + num_top], strict=True)
            top = tuple(TokenLogprob(*pair) for pair in columns)
            tokens.append(GeneratedToken(token_id, StepLogprobs(TokenLogprob(token_id, chosen), top)))
            at += num_top
        return tuple(tokens)

    def _add(self, logprobs: StepLogprobs) -> None:
        self._chosen.append(logprobs.chosen.logprob)
        self._num_top.append(len(logprobs.top))
        for one in logprobs.top:
            self._top_ids.append(one.token_id)
            self._top_logprobs.append(one.logprob)


def num_bytes(tokens: Iterable[GeneratedToken]) -> int:
    """What they take in columns."""
    return sum(token_bytes(None if one.logprobs is None else len(one.logprobs.top)) for one in tokens)


def token_bytes(num_top: int | None) -> int:
    """What a token takes with so many top log-probabilities; None: without any."""
    return TOKEN_BYTES if num_top is None else TOKEN_BYTES + LOGPROB_BYTES + TOP_BYTES * num_top
