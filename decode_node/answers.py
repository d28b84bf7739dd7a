"""The answers that one caller reads by one stream: what it asked for, and what there is to tell it.

A step pushes tokens into many answers at once; the stream's task is woken once and takes all of them into one message.
What comes while a message is on its way waits in the answers, so a slow caller gets more at a time, and the node holds
no more for it than the answers' own tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from decode_node.node import DecodeNode
from decode_node.streams import TokenStream, num_values
from kvrelay.errors import DeadlineError, InvalidRequestError, KVRelayError, NotFoundError
from kvrelay.messages import AnswersAdvanced, AnswersAsked, AnswerWanted, DecodeFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import AnswerHandle, ReservationId, check_ttl_s

MAX_MESSAGE_VALUES = 50_000  # token ids and log-probabilities: some 600 KiB


@dataclass(frozen=True, slots=True)
class _Answer:
    reservation_id: ReservationId
    stream: TokenStream
    timer: asyncio.TimerHandle | None


class Answers:
    """Belongs to the event loop. Whoever makes one has to `leave` it in the end."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._answers: dict[AnswerHandle, _Answer] = {}
        self._refused: list[tuple[AnswerHandle, KVRelayError]] = []
        self._news: dict[AnswerHandle, None] = {}  # answers that have some, in the order in which it came
        self._arrived = asyncio.Event()
        self._is_closed = False

    def ask(self, asked: AnswersAsked) -> None:
        """Opens and ends answers. What is wrong with one is told as its end.

        Raises InvalidRequestError for a handle that is in use: nothing that is told of it could be understood.
        """
        for wanted in asked.wanted:
            self._open(wanted)
        for handle in asked.left:
            self._end(handle)

    async def next(self) -> AnswersAdvanced | None:
        """What came since the last call, or as much as one message takes; None once closed, when all is told."""
        while not self._news and not self._refused:
            if self._is_closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._take()

    def close(self) -> None:
        """Nothing more is asked; what there is will still be told."""
        self._is_closed = True
        self._arrived.set()

    def leave(self) -> None:
        """Nobody reads any more: every answer ends, and frees all it held."""
        for handle in tuple(self._answers):
            self._end(handle)
        self._refused.clear()
        self.close()

    def _open(self, wanted: AnswerWanted) -> None:
        handle = wanted.handle
        if handle in self._answers:
            raise InvalidRequestError(f"handle {handle} is in use; each answer of a stream needs one of its own")
        try:
            if not wanted.reservation_id:
                raise InvalidRequestError("reservation id is empty")
            check_ttl_s("timeout_s", wanted.timeout_s)
            stream = self._node.open(wanted.reservation_id, compute_tail=wanted.compute_tail)
        except KVRelayError as error:
            self._refused.append((handle, error))
            self._arrived.set()
            return
        self._answers[handle] = _Answer(wanted.reservation_id, stream, self._timer(wanted))
        stream.read_by(partial(self._note, handle))

    def _timer(self, wanted: AnswerWanted) -> asyncio.TimerHandle | None:
        if wanted.timeout_s == 0:
            return None
        late = DeadlineError(f"the answer was not complete within {wanted.timeout_s:g} s")
        loop = asyncio.get_running_loop()
        return loop.call_later(wanted.timeout_s, self._node.end, wanted.reservation_id, late)

    def _note(self, handle: AnswerHandle) -> None:
        if handle in self._answers:
            self._news[handle] = None
            self._arrived.set()

    def _take(self) -> AnswersAdvanced:
        ended: list[tuple[AnswerHandle, DecodeFinished | KVRelayError]] = [*self._refused]
        self._refused.clear()
        tokens: list[tuple[AnswerHandle, tuple[GeneratedToken, ...]]] = []
        num_left = MAX_MESSAGE_VALUES
        while self._news and num_left > 0:
            handle = next(iter(self._news))
            stream = self._answers[handle].stream
            if taken := stream.take(num_left):
                tokens.append((handle, taken))
                num_left -= sum(map(num_values, taken))
            if not stream.has_tokens:
                del self._news[handle]
            if (end := stream.end) is not None:
                ended.append((handle, end))
                self._end(handle)
        return AnswersAdvanced(tuple(tokens), tuple(ended))

    def _end(self, handle: AnswerHandle) -> None:
        """Does nothing when it has ended."""
        answer = self._answers.pop(handle, None)
        if answer is None:
            return
        self._news.pop(handle, None)
        if answer.timer is not None:
            answer.timer.cancel()
        self._node.end(
            answer.reservation_id, NotFoundError(f"the answer of reservation {answer.reservation_id} has ended")
        )
