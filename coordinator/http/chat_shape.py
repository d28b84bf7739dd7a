"""Answers as POST /v1/chat/completions writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.http.answers import Ended, Grew
from coordinator.http.call_object import ArgumentsGrew, CallBegan, Piece, Said
from coordinator.http.logprobs import TokenWriter, chat_logprobs
from coordinator.http.reply import WholeChoice
from coordinator.http.tool_calls import MakeReader, Reader
from kvrelay.types import FinishReason

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"


class ChatShape:
    """`writer` shows log-probabilities, where they were asked for; `make_reader` reads calls of tools."""

    def __init__(self, writer: TokenWriter | None, make_reader: MakeReader) -> None:
        self._writer = writer
        self._make_reader = make_reader
        self._readers: dict[int, Reader] = {}  # of answers of which a chunk has named the role
        self._callers: set[int] = set()  # answers that call a tool

    def whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        reader = self._make_reader()
        message = _message([*reader.push("".join(choice.text)), *reader.end()])
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(choice.tokens, self._writer) if self._writer else None,
            "finish_reason": _finish_reason(choice.reason, calls="tool_calls" in message),
            "stop_reason": choice.stop_string or None,
        }

    def grew(self, event: Grew) -> list[dict[str, Any]]:
        chunks = self._beginning(event.index)
        deltas = self._deltas(event.index, self._readers[event.index].push(event.text))
        if not (self._writer and event.tokens):
            return [*chunks, *(_chunk(event.index, delta) for delta in deltas)]
        first, *others = deltas or [{"content": ""}]
        chunks.append(_chunk(event.index, first, chat_logprobs(event.tokens, self._writer)))
        return [*chunks, *(_chunk(event.index, delta) for delta in others)]

    def ended(self, event: Ended) -> list[dict[str, Any]]:
        chunks = self._beginning(event.index)
        chunks += [_chunk(event.index, one) for one in self._deltas(event.index, self._readers[event.index].end())]
        last = _chunk(event.index, {})
        last["finish_reason"] = _finish_reason(event.reason, calls=event.index in self._callers)
        last["stop_reason"] = event.stop_string or None
        return [*chunks, last]

    def _beginning(self, index: int) -> list[dict[str, Any]]:
        if index in self._readers:
            return []
        self._readers[index] = self._make_reader()
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def _deltas(self, index: int, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        deltas = []
        for piece in pieces:
            if isinstance(piece, CallBegan):
                self._callers.add(index)
            deltas.append(_delta(piece))
        return deltas


def _chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Said(text):
            return {"content": text}
        case CallBegan(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsGrew(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Without text `content` is null beside calls, and else empty."""
    content, calls = "", []
    for piece in pieces:
        match piece:
            case Said(text):
                content += text
            case CallBegan(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case ArgumentsGrew(index, text):
                calls[index]["function"]["arguments"] += text  # type: ignore[index]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    return {**message, "tool_calls": calls} if calls else message


def _finish_reason(reason: FinishReason, *, calls: bool) -> str:
    return "tool_calls" if calls and reason is FinishReason.STOP else reason.value
