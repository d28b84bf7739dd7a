"""All events of one request, for any number of readers that come and go.

Takes an outbox's place where an answer may be read again: nothing that was read is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from coordinator.outbox import MAX_EVENT_TOKENS
from coordinator.token_columns import TokenColumns, num_bytes
from kvrelay.inference import ChoiceFinished, GenerateEvent, RequestFailed, RequestFinished, TokensGenerated

MAX_CHAR_BYTES = 4  # a text with any character beyond ASCII is taken to have the widest ones only


@dataclass(slots=True)
class _Piece:
    """Of one answer, what an event may carry."""

    tokens: TokenColumns = field(default_factory=TokenColumns)
    text: str = ""


@dataclass(slots=True)
class _AnswerLog:
    pieces: list[_Piece] = field(default_factory=list)
    end: ChoiceFinished | None = None

    def add(self, event: TokensGenerated) -> None:
        if not self.pieces or len(self.pieces[-1].tokens) >= MAX_EVENT_TOKENS:
            self.pieces.append(_Piece())
        piece = self.pieces[-1]
        piece.tokens.extend(event.tokens)
        piece.text += event.text


@dataclass(slots=True)
class _Position:
    """How far one reader is in one answer."""

    piece: int = 0
    num_tokens: int = 0  # of that piece
    num_chars: int = 0
    has_ended: bool = False

    def read(self, index: int, log: _AnswerLog) -> Iterator[TokensGenerated | ChoiceFinished]:
        """What there is beyond it, which it moves over."""
        while self.piece < len(log.pieces):
            piece = log.pieces[self.piece]
            tokens, text = piece.tokens.since(self.num_tokens), piece.text[self.num_chars :]
            is_last = self.piece + 1 == len(log.pieces)
            if is_last:
                self.num_tokens, self.num_chars = len(piece.tokens), len(piece.text)
            else:
                self.piece, self.num_tokens, self.num_chars = self.piece + 1, 0, 0
            if tokens or text:
                yield TokensGenerated(tokens, text, index)
            elif is_last:
                break
        if log.end is not None and not self.has_ended:
            self.has_ended = True
            yield log.end


class EventLog:
    """One producer, any number of readers, each with a place of its own. Belongs to an event loop."""

    def __init__(self) -> None:
        self._begin: list[GenerateEvent] = []  # what belongs to no answer
        self._answers: dict[int, _AnswerLog] = {}
        self._end: RequestFinished | RequestFailed | None = None
        self._num_puts = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self.num_bytes = 0

    @property
    def end(self) -> RequestFinished | RequestFailed | None:
        """The terminal event, once it is there."""
        return self._end

    def put(self, event: GenerateEvent) -> None:
        match event:
            case TokensGenerated():
                self._answers.setdefault(event.index, _AnswerLog()).add(event)
                self.num_bytes += num_bytes(event.tokens) + _text_bytes(event.text)
            case ChoiceFinished():
                self._answers.setdefault(event.index, _AnswerLog()).end = event
            case RequestFinished() | RequestFailed():
                self._end = event
            case _:
                self._begin.append(event)
        self._num_puts += 1
        self._wake()

    async def events(self) -> AsyncIterator[GenerateEvent]:
        """Every event from the first one on, the terminal one last; those of one answer in order. What came while the
        reader was busy comes in events of up to MAX_EVENT_TOKENS tokens."""
        num_begun, places = 0, dict[int, _Position]()
        while True:
            num_seen = self._num_puts
            while num_begun < len(self._begin):
                num_begun += 1
                yield self._begin[num_begun - 1]
            for index, answer in list(self._answers.items()):
                for event in places.setdefault(index, _Position()).read(index, answer):
                    yield event
            if num_seen == self._num_puts:
                if self._end is not None:
                    yield self._end
                    return
                await self._more()

    async def _more(self) -> None:
        arrived = asyncio.get_running_loop().create_future()
        self._waiting.add(arrived)
        try:
            await arrived
        finally:
            self._waiting.discard(arrived)

    def _wake(self) -> None:
        for arrived in self._waiting:
            if not arrived.done():  # a put may follow another before its readers run
                arrived.set_result(None)


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else MAX_CHAR_BYTES * len(text)
