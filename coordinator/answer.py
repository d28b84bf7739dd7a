"""One answer as it grows: its tokens, its text, and when it is complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.detokenizer import Detokenizer, TokenBytes
from kvrelay.errors import KVRelayError
from kvrelay.inference import TokensGenerated
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import FinishReason


class Answer:
    """Survives the nodes that compute it: what is here already is never asked for again.

    `sampling` has max_tokens settled. `eos_token_ids` are the model's. `index` is its number among the answers to one
    prompt. `reason` is set once, when the answer is complete; nothing is added after that.
    """

    def __init__(
        self, tokenizer: TokenBytes, sampling: SamplingParams, eos_token_ids: Sequence[int], index: int = 0
    ) -> None:
        assert sampling.max_tokens is not None
        self._index = index
        self._max_tokens = sampling.max_tokens
        self._sampling = sampling
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = Detokenizer(tokenizer, sampling.stop)
        self.token_ids: list[int] = []
        self.reason: FinishReason | None = None

    @property
    def num_left(self) -> int:
        """Tokens it may still get."""
        return self._max_tokens - len(self.token_ids)

    @property
    def stop_string(self) -> str:
        """The stop string that ended it, or ""."""
        return self._detokenizer.stopped or ""

    def add(self, tokens: Sequence[GeneratedToken]) -> TokensGenerated:
        """Takes the next tokens, up to and including the one that completes the answer.

        Raises KVRelayError when a node goes on after the end.
        """
        taken: list[GeneratedToken] = []
        text = ""
        for token in tokens:
            if self.reason is not None:
                if self.stop_string:
                    break  # the node, which knows no stop strings, was ahead
                raise KVRelayError(f"a decode node went on after token {len(self.token_ids)}, which ends the answer")
            taken.append(token)
            text += self._add(token.token_id)
        if self.reason is not None and not self.stop_string:
            text += self._flush()
        return TokensGenerated(tuple(taken), text, self._index)

    def end(self, reason: FinishReason) -> TokensGenerated:
        """The node says that the answer is complete; the text that was held back, unless it is known already."""
        if self.reason is not None:
            return TokensGenerated((), "", self._index)
        self.reason = reason
        return TokensGenerated((), self._flush(), self._index)

    def _add(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        num_tokens = len(self.token_ids)
        if self._sampling.ends_answer(token_id, num_tokens, self._eos_token_ids):
            self.reason = FinishReason.STOP  # counted, but its text is not shown
            return ""
        text = self._detokenizer.push(token_id, may_stop=num_tokens >= self._sampling.min_tokens)
        if self._detokenizer.stopped:
            self.reason = FinishReason.STOP
        elif num_tokens >= self._max_tokens:
            self.reason = FinishReason.LENGTH
        return text

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self.stop_string:
            self.reason = FinishReason.STOP
        return text
