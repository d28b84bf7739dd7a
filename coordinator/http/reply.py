"""What every reply of answers has: who it is from, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.http.answers import Answers, Ended, Grew
from coordinator.http.errors import error_body
from coordinator.http.usage import usage_body
from kvrelay.errors import KVRelayError
from kvrelay.sampling import GeneratedToken
from kvrelay.types import FinishReason


@dataclass(frozen=True, slots=True)
class Head:
    """`created` is in seconds since 1970. `fingerprint` names the model's content."""

    reply_id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None = None

    def body(self, kind: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return body if self.service_tier is None else {**body, "service_tier": self.service_tier}


@dataclass(slots=True)
class WholeChoice:
    """One answer, when nobody reads it before it is complete."""

    text: list[str] = field(default_factory=list)
    tokens: list[GeneratedToken] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    stop_string: str = ""


class Reply(Protocol):
    """To one request."""

    answers: Answers
    done: bytes  # what ends a stream that is complete

    async def whole(self) -> dict[str, Any]:
        """Raises KVRelayError."""

    def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Raises KVRelayError. Read instead of `whole`."""

    def error(self, error: KVRelayError) -> dict[str, Any]:
        """The last chunk of a stream that breaks."""


class Shape(Protocol):
    """How one endpoint writes answers."""

    def whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        """An answer that is complete."""

    def grew(self, event: Grew) -> list[dict[str, Any]]:
        """What a chunk each shows of it; none where there is nothing to show yet."""

    def ended(self, event: Ended) -> list[dict[str, Any]]:
        """The last chunks of an answer."""


class ChoicesReply:
    """Of chats and completions. `kind` is the reply's "object", `chunk_kind` that of its chunks.

    `include_usage` asks for a last chunk with the usage, `continuous_usage` for it in each chunk.
    """

    done = b"data: [DONE]\n\n"

    def __init__(
        self,
        answers: Answers,
        shape: Shape,
        head: Head,
        kind: str,
        chunk_kind: str,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.answers = answers
        self._shape = shape
        self._body = head.body(kind)
        self._chunk = head.body(chunk_kind)
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    async def whole(self) -> dict[str, Any]:
        """Raises KVRelayError."""
        choices = [WholeChoice() for _ in range(self.answers.num_choices)]
        async with aclosing(self.answers.events()) as events:
            async for event in events:
                choice = choices[event.index]
                if isinstance(event, Grew):
                    choice.text.append(event.text)
                    choice.tokens += event.tokens
                else:
                    choice.reason, choice.stop_string = event.reason, event.stop_string
        shown = [self._shape.whole(index, choice) for index, choice in enumerate(choices)]
        return {**self._body, "choices": shown, "usage": usage_body(self.answers.usage)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Raises KVRelayError."""
        async with aclosing(self.answers.events()) as events:
            async for event in events:
                for choice in self._shape.grew(event) if isinstance(event, Grew) else self._shape.ended(event):
                    yield self._chunk_of([choice], with_usage=self._continuous_usage)
        if self._include_usage:
            yield self._chunk_of([], with_usage=True)

    def error(self, error: KVRelayError) -> dict[str, Any]:
        return error_body(error)

    def _chunk_of(self, choices: list[dict[str, Any]], *, with_usage: bool) -> dict[str, Any]:
        chunk = {**self._chunk, "choices": choices}
        return {**chunk, "usage": usage_body(self.answers.usage)} if with_usage else chunk
