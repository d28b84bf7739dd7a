"""Log-probabilities in the two shapes of OpenAI's API: entries for chats, columns for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from kvrelay.tokenizer import Tokenizer

LEAST = -9999.0  # stands for what JSON cannot write, of a token that cannot be drawn


class TokenWriter:
    """Tokens as they are shown. `as_ids`: as "token_id:" and the id, which no two tokens share."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int, part_prefix: str = "") -> str:
        """A part of a character is written by its bytes, as \\xe2, after `part_prefix`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        written = self.bytes(token_id)
        try:
            return written.decode() or self._tokenizer.written(token_id)
        except UnicodeDecodeError:
            return part_prefix + "".join(f"\\x{byte:02x}" for byte in written)


def chat_logprobs(tokens: Sequence[GeneratedToken], writer: TokenWriter) -> dict[str, Any]:
    content = [
        {**_entry(step.chosen, writer), "top_logprobs": [_entry(one, writer) for one in step.top]}
        for step in _steps(tokens)
    ]
    return {"content": content, "refusal": None}


def _entry(token: TokenLogprob, writer: TokenWriter) -> dict[str, Any]:
    return {
        "token": writer.text(token.token_id),
        "logprob": max(token.logprob, LEAST),
        "bytes": list(writer.bytes(token.token_id)),
    }


class CompletionLogprobs:
    """Of one answer, whose text begins `offset` characters into what is sent."""

    def __init__(self, writer: TokenWriter, offset: int = 0) -> None:
        self._writer = writer
        self._num_chars = offset

    def add(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """Of the answer's next tokens; `text_offset` is where in the text the character begins that the token does, or
        goes on with."""
        steps = _steps(tokens)
        return {
            "tokens": [self._text(step.chosen) for step in steps],
            "token_logprobs": [max(step.chosen.logprob, LEAST) for step in steps],
            "top_logprobs": [self._top(step) for step in steps],
            "text_offset": [self._offset(step.chosen.token_id) for step in steps],
        }

    def _top(self, step: StepLogprobs) -> dict[str, float]:
        return {self._text(one): max(one.logprob, LEAST) for one in (*step.top, step.chosen)}

    def _text(self, token: TokenLogprob) -> str:
        return self._writer.text(token.token_id, "bytes:")

    def _offset(self, token_id: int) -> int:
        written = self._writer.bytes(token_id)
        begins = [byte & 0xC0 != 0x80 for byte in written]  # of each byte, whether a character begins with it
        offset = self._num_chars if not begins or begins[0] else self._num_chars - 1
        self._num_chars += sum(begins)
        return max(offset, 0)


def _steps(tokens: Sequence[GeneratedToken]) -> list[StepLogprobs]:
    return [token.logprobs for token in tokens if token.logprobs is not None]
