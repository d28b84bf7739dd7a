"""The answers to the prompts of one HTTP request, as one stream of what each of them gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from coordinator.front_door import Answering
from coordinator.response_cache import CachedAnswer
from kvrelay.errors import error_of
from kvrelay.inference import (
    ChoiceFinished,
    GenerateEvent,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    TokensGenerated,
    Usage,
)
from kvrelay.sampling import GeneratedToken
from kvrelay.types import CachedTokens, FinishReason

MAX_UNREAD = 16  # events of several prompts; those behind them wait where tokens are merged


@dataclass(frozen=True, slots=True)
class Grew:
    """More of answer `index`; `text` may lag behind the tokens."""

    index: int
    tokens: tuple[GeneratedToken, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer `index` is complete."""

    index: int
    reason: FinishReason
    stop_string: str


class Answers:
    """`n` answers to each prompt; answer i of prompt p has the index p * n + i. Read once.

    `usage` is of all of them, so far; cached tokens are known when a prompt's answers are complete.
    """

    def __init__(self, prompts: Sequence[Answering], n: int, *, shows_stop: bool = False) -> None:
        """`shows_stop`: the stop string that ends an answer is part of it."""
        self._prompts = prompts
        self._n = n
        self._shows_stop = shows_stop
        self._usages = [Usage(0, 0)] * len(prompts)

    @property
    def num_choices(self) -> int:
        return self._n * len(self._prompts)

    @property
    def is_cached(self) -> bool:
        """Nothing of it was computed anew."""
        return all(isinstance(prompt, CachedAnswer) for prompt in self._prompts)

    @property
    def usage(self) -> Usage:
        return Usage(
            sum(usage.prompt_tokens for usage in self._usages),
            sum(usage.completion_tokens for usage in self._usages),
            CachedTokens(device=sum(usage.cached.total for usage in self._usages)),
        )

    def left(self) -> None:
        """Nobody reads on; does nothing to answers that are complete."""
        for prompt in self._prompts:
            prompt.left()

    async def events(self) -> AsyncGenerator[Grew | Ended, None]:
        """Raises the KVRelayError of the first prompt that fails."""
        async with aclosing(self._numbered()) as numbered:
            async for prompt, event in numbered:
                for told in self._told(prompt, event):
                    yield told

    def _told(self, prompt: int, event: GenerateEvent) -> list[Grew | Ended]:
        usage, first = self._usages[prompt], prompt * self._n
        match event:
            case RequestAccepted():
                self._usages[prompt] = Usage(event.prompt_tokens, 0)
            case TokensGenerated():
                num_tokens = usage.completion_tokens + len(event.tokens)
                self._usages[prompt] = Usage(usage.prompt_tokens, num_tokens)
                return [Grew(first + event.index, event.tokens, event.text)]
            case ChoiceFinished():
                return self._ended(first + event.index, event.reason, event.stop_string)
            case RequestFinished():
                self._usages[prompt] = event.usage
                return self._ended(first, event.reason, event.stop_string) if self._n == 1 else []
            case RequestFailed():
                raise error_of(event.code, event.message, retryable=event.retryable, retry_after_s=event.retry_after_s)
        return []

    def _ended(self, index: int, reason: FinishReason, stop_string: str) -> list[Grew | Ended]:
        ended = Ended(index, reason, stop_string)
        return [Grew(index, (), stop_string), ended] if self._shows_stop and stop_string else [ended]

    def _numbered(self) -> AsyncGenerator[tuple[int, GenerateEvent], None]:
        return self._of_one() if len(self._prompts) == 1 else self._of_several()

    async def _of_one(self) -> AsyncGenerator[tuple[int, GenerateEvent], None]:
        async for event in self._prompts[0].events():
            yield 0, event

    async def _of_several(self) -> AsyncGenerator[tuple[int, GenerateEvent], None]:
        unread: asyncio.Queue[tuple[int, GenerateEvent] | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_UNREAD)  # not the queue's own bound: a reader that is cancelled must find room
        reading = [asyncio.create_task(self._read(number, unread, room)) for number in range(len(self._prompts))]
        try:
            num_open = len(reading)
            while num_open:
                entry = await unread.get()
                if entry is None:
                    num_open -= 1
                else:
                    room.release()
                    yield entry
            await asyncio.gather(*reading)  # raises what broke one of them
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(
        self, number: int, unread: asyncio.Queue[tuple[int, GenerateEvent] | None], room: asyncio.Semaphore
    ) -> None:
        try:
            async for event in self._prompts[number].events():
                await room.acquire()
                unread.put_nowait((number, event))
        finally:
            unread.put_nowait(None)
