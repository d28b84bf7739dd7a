"""Answers as POST /v1/completions writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.http.answers import Ended, Grew
from coordinator.http.logprobs import CompletionLogprobs, TokenWriter
from coordinator.http.reply import WholeChoice

KIND = "text_completion"  # of a reply and of its chunks


class CompletionShape:
    """`writer` shows log-probabilities, where they were asked for; `echoes` are the texts that answers follow."""

    def __init__(self, writer: TokenWriter | None, echoes: Sequence[str]) -> None:
        self._echoes = echoes
        self._logprobs = [CompletionLogprobs(writer) for _ in echoes] if writer else None
        self._begun: set[int] = set()  # answers of which a chunk has shown the echo

    def whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        logprobs = self._logprobs[index].add(choice.tokens) if self._logprobs else None
        shown = _choice(index, self._echoes[index] + "".join(choice.text), logprobs)
        return {**shown, "finish_reason": choice.reason.value, "stop_reason": choice.stop_string or None}

    def grew(self, event: Grew) -> list[dict[str, Any]]:
        text = self._echo(event.index) + event.text
        if not text and not (self._logprobs and event.tokens):
            return []
        logprobs = self._logprobs[event.index].add(event.tokens) if self._logprobs else None
        return [_choice(event.index, text, logprobs)]

    def ended(self, event: Ended) -> list[dict[str, Any]]:
        last = _choice(event.index, self._echo(event.index), None)
        return [{**last, "finish_reason": event.reason.value, "stop_reason": event.stop_string or None}]

    def _echo(self, index: int) -> str:
        if index in self._begun:
            return ""
        self._begun.add(index)
        return self._echoes[index]


def _choice(index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
