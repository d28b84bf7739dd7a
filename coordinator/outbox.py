"""What waits to be sent to one request's client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvrelay.inference import GenerateEvent, RequestFailed, RequestFinished, TokensGenerated

MAX_EVENT_TOKENS = 1_000  # some 240 KiB with 20 log-probabilities each; a client's gRPC takes 4 MiB unless told


class _Unsent:
    """Of one answer, what came since its last event was taken or full: mostly a single one, which stays as it is."""

    __slots__ = ("events", "num_tokens")

    def __init__(self, event: TokensGenerated) -> None:
        self.events = [event]
        self.num_tokens = len(event.tokens)

    @property
    def index(self) -> int:
        return self.events[0].index

    def add(self, event: TokensGenerated) -> None:
        self.events.append(event)
        self.num_tokens += len(event.tokens)

    def event(self) -> TokensGenerated:
        if len(self.events) == 1:
            return self.events[0]
        tokens = tuple(token for event in self.events for token in event.tokens)
        return TokensGenerated(tokens, "".join(event.text for event in self.events), self.index)


class Outbox:
    """One producer, one consumer. A slow client gets its tokens in larger events: of one answer only the last that
    waits has fewer than MAX_EVENT_TOKENS."""

    def __init__(self) -> None:
        self._alone: GenerateEvent | None = None  # all that waits, as long as the consumer keeps up
        self._entries: deque[GenerateEvent | _Unsent] = deque()
        self._unsent: dict[int, _Unsent] = {}
        self._arrived: asyncio.Future[None] | None = None  # what the consumer waits for

    def put(self, event: GenerateEvent) -> None:
        if self._alone is None and not self._entries:
            self._alone = event
        else:
            if self._alone is not None:
                self._enqueue(self._alone)
                self._alone = None
            self._enqueue(event)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def events(self) -> AsyncIterator[GenerateEvent]:
        """Every event, the terminal one last; those of one answer in order. May be read once."""
        loop = asyncio.get_running_loop()
        while True:
            if self._alone is None and not self._entries:
                self._arrived = loop.create_future()
                await self._arrived
            event = self._take()
            yield event
            if isinstance(event, RequestFinished | RequestFailed):
                return

    def _enqueue(self, event: GenerateEvent) -> None:
        if isinstance(event, TokensGenerated):
            self._add(event)
        else:
            self._entries.append(event)

    def _add(self, event: TokensGenerated) -> None:
        unsent = self._unsent.get(event.index)
        if unsent is not None and unsent.num_tokens < MAX_EVENT_TOKENS:
            unsent.add(event)
            return
        unsent = self._unsent[event.index] = _Unsent(event)
        self._entries.append(unsent)

    def _take(self) -> GenerateEvent:
        if (event := self._alone) is not None:
            self._alone = None
            return event
        entry = self._entries.popleft()
        if not isinstance(entry, _Unsent):
            return entry
        if self._unsent[entry.index] is entry:
            del self._unsent[entry.index]
        return entry.event()
