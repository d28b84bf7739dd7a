"""Items of a response's output: a message of text, or the call of a function. Each tells its life in events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

Event = dict[str, Any]


class Item(Protocol):
    """`index` is its place in the output."""

    def body(self) -> dict[str, Any]: ...

    def open(self, index: int) -> Iterator[Event]: ...

    def grow(self, text: str, index: int, logprobs: list[dict[str, Any]]) -> Iterator[Event]: ...

    def close(self, status: str, index: int) -> Iterator[Event]: ...


class MessageItem:
    def __init__(self, item_id: str) -> None:
        self._id = item_id
        self._status = "in_progress"
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        content = [] if self._status == "in_progress" else [self._part()]
        return {"id": self._id, "type": "message", "status": self._status, "role": "assistant", "content": content}

    def open(self, index: int) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": index, "item": self.body()}
        yield {"type": "response.content_part.added", **self._place(index), "part": self._part()}

    def grow(self, text: str, index: int, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        self._text += text
        self._logprobs += logprobs
        yield {"type": "response.output_text.delta", **self._place(index), "delta": text, "logprobs": logprobs}

    def close(self, status: str, index: int) -> Iterator[Event]:
        self._status = status
        said = {"text": self._text, "logprobs": self._logprobs}
        yield {"type": "response.output_text.done", **self._place(index), **said}
        yield {"type": "response.content_part.done", **self._place(index), "part": self._part()}
        yield {"type": "response.output_item.done", "output_index": index, "item": self.body()}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": index, "content_index": 0}


class CallItem:
    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self._id = item_id
        self._call_id = call_id
        self._name = name
        self._status = "in_progress"
        self._arguments = ""

    def body(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": self._status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
        }

    def open(self, index: int) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": index, "item": self.body()}

    def grow(self, text: str, index: int, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """A call shows no log-probabilities."""
        self._arguments += text
        place = {"item_id": self._id, "output_index": index}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def close(self, status: str, index: int) -> Iterator[Event]:
        self._status = status
        said = {"item_id": self._id, "output_index": index, "name": self._name, "arguments": self._arguments}
        yield {"type": "response.function_call_arguments.done", **said}
        yield {"type": "response.output_item.done", "output_index": index, "item": self.body()}
