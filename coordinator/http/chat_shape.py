"""Answers as POST /v1/chat/completions writes them."""

from __future__ import annotations

from typing import Any

from coordinator.http.answers import Ended, Grew
from coordinator.http.logprobs import TokenWriter, chat_logprobs
from coordinator.http.reply import WholeChoice

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"


class ChatShape:
    """`writer` shows log-probabilities, where they were asked for."""

    def __init__(self, writer: TokenWriter | None) -> None:
        self._writer = writer
        self._begun: set[int] = set()  # answers of which a chunk has named the role

    def whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": chat_logprobs(choice.tokens, self._writer) if self._writer else None,
            "finish_reason": choice.reason.value,
            "stop_reason": choice.stop_string or None,
        }

    def grew(self, event: Grew) -> list[dict[str, Any]]:
        chunks = self._beginning(event.index)
        if event.text or (self._writer and event.tokens):
            logprobs = chat_logprobs(event.tokens, self._writer) if self._writer else None
            chunks.append(_chunk(event.index, {"content": event.text}, logprobs))
        return chunks

    def ended(self, event: Ended) -> list[dict[str, Any]]:
        last = _chunk(event.index, {})
        last["finish_reason"], last["stop_reason"] = event.reason.value, event.stop_string or None
        return [*self._beginning(event.index), last]

    def _beginning(self, index: int) -> list[dict[str, Any]]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [_chunk(index, {"role": "assistant", "content": ""})]


def _chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
