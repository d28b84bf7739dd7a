"""Which of one stream's tokens are whose. A state machine over plain data; no I/O, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from kvrelay.errors import KVRelayError
from kvrelay.messages import AnswersAdvanced, AnswersAsked, AnswerWanted, DecodeFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import AnswerHandle, ReservationId


class Reader(Protocol):
    """What hears of one answer. Neither method raises, since the others' turns come after it."""

    def take(self, tokens: tuple[GeneratedToken, ...]) -> None:
        """The next ones, at least one."""

    def end(self, end: DecodeFinished | KVRelayError) -> None:
        """Once, as the last thing it hears."""


class Demultiplexer:
    """The answers that are open on one stream.

    A handle is used once, so what is still on its way for an answer that was left is known for that and dropped.
    """

    def __init__(self) -> None:
        self._handles = map(AnswerHandle, itertools.count(1))
        self._readers: dict[AnswerHandle, Reader] = {}
        self._wanted: list[AnswerWanted] = []
        self._left: list[AnswerHandle] = []

    def __len__(self) -> int:
        return len(self._readers)

    def begin(
        self, reader: Reader, reservation_id: ReservationId, *, compute_tail: bool, timeout_s: float
    ) -> AnswerHandle:
        """Opens an answer; the other side is to be asked for it."""
        handle = next(self._handles)
        self._readers[handle] = reader
        self._wanted.append(AnswerWanted(handle, reservation_id, compute_tail, timeout_s))
        return handle

    def leave(self, handle: AnswerHandle) -> None:
        """Closes an answer whose reader wants no more of it; the other side is to be told, unless it has ended."""
        if self._readers.pop(handle, None) is not None:
            self._left.append(handle)

    def to_ask(self) -> AnswersAsked | None:
        """What the other side does not know yet, once; None when there is nothing. An answer that was left before it
        was asked for is asked for and left, so that its reservation ends too."""
        if not self._wanted and not self._left:
            return None
        asked = AnswersAsked(tuple(self._wanted), tuple(self._left))
        self._wanted, self._left = [], []
        return asked

    def advance(self, advanced: AnswersAdvanced) -> None:
        """Gives each its own. A reader may leave its answer, or others, or begin some meanwhile."""
        for handle, tokens in advanced.tokens:
            reader = self._readers.get(handle)
            if reader is not None:
                reader.take(tokens)
        for handle, end in advanced.ended:
            reader = self._readers.pop(handle, None)
            if reader is not None:
                reader.end(end)

    def fail(self, error: Callable[[], KVRelayError]) -> None:
        """The stream is over: every open answer ends with an error of its own."""
        readers, self._readers = self._readers, {}
        self._wanted, self._left = [], []
        for reader in readers.values():
            reader.end(error())
