"""An answer as POST /v1/responses writes it: items of output, and an event for each step of their lives."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from coordinator.http.answers import Answers, Ended, Grew
from coordinator.http.call_object import ArgumentsGrew, CallBegan, Piece, Said
from coordinator.http.errors import error_body
from coordinator.http.logprobs import TokenWriter, chat_logprobs
from coordinator.http.responses_items import CallItem, Item, MessageItem
from coordinator.http.tool_calls import Reader
from kvrelay.errors import KVRelayError
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason

Event = dict[str, Any]


class ResponsesReply:
    """`body` is the response as it begins: what it was asked with. Chunks are events; the last one has all of it."""

    done = b""  # after the last event

    def __init__(self, answers: Answers, body: dict[str, Any], reader: Reader, writer: TokenWriter | None) -> None:
        self.answers = answers
        self._body = body
        self._reader = reader
        self._writer = writer
        self._items: list[Item] = []
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        """Raises KVRelayError."""
        last: Event = {}
        async with aclosing(self.chunks()) as events:
            async for event in events:
                last = event
        response: dict[str, Any] = last["response"]
        return response

    async def chunks(self) -> AsyncGenerator[Event, None]:
        """Raises KVRelayError."""
        has_begun = False
        async with aclosing(self.answers.events()) as answer:
            async for event in answer:
                if not has_begun:
                    has_begun = True
                    yield self._numbered({"type": "response.created", "response": self._response("in_progress")})
                    yield self._numbered({"type": "response.in_progress", "response": self._response("in_progress")})
                for told in self._told(event):
                    yield self._numbered(told)

    def error(self, error: KVRelayError) -> Event:
        told = error_body(error)["error"]
        fields = {key: told[key] for key in ("code", "message", "param")}
        return self._numbered({"type": "error", **fields})

    def _told(self, event: Grew | Ended) -> Iterator[Event]:
        if isinstance(event, Grew):
            yield from self._add(self._reader.push(event.text), event.tokens)
            return
        yield from self._add(self._reader.end(), ())
        if not self._items:
            yield from self._open(MessageItem(self._item_id("msg")))
        is_cut = event.reason is FinishReason.LENGTH
        yield from self._items[-1].close("incomplete" if is_cut else "completed", len(self._items) - 1)
        status = "incomplete" if is_cut else "completed"
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _add(self, pieces: Iterable[Piece], tokens: tuple[GeneratedToken, ...]) -> Iterator[Event]:
        logprobs = chat_logprobs(tokens, self._writer)["content"] if self._writer else []
        for piece in pieces:
            match piece:
                case Said(text):
                    if not self._items or not isinstance(self._items[-1], MessageItem):
                        yield from self._open(MessageItem(self._item_id("msg")))
                    yield from self._items[-1].grow(text, len(self._items) - 1, logprobs)
                    logprobs = []
                case CallBegan(_, call_id, name):
                    yield from self._open(CallItem(self._item_id("fc"), call_id, name))
                case ArgumentsGrew(_, text):
                    yield from self._items[-1].grow(text, len(self._items) - 1, [])

    def _open(self, item: Item) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].close("completed", len(self._items) - 1)
        self._items.append(item)
        yield from item.open(len(self._items) - 1)

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._body['id'].removeprefix('resp_')}-{len(self._items)}"

    def _response(self, status: str) -> dict[str, Any]:
        is_over = status != "in_progress"
        return {
            **self._body,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.body() for item in self._items],
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.answers.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached.total, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}
