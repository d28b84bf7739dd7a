"""The answers that one caller reads at one decode node, all on one stream.

A node sends one message for all that a step gave, so it is read once, by one task, which hands each answer its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from kvrelay.errors import CancelledError, DeadlineError, KVRelayError, UnavailableError
from kvrelay.messages import DecodeFinished, TokensDecoded
from kvrelay.rpc import convert_decode
from kvrelay.rpc.channel import Cancellable, error_from_rpc
from kvrelay.rpc.demultiplexer import Demultiplexer
from kvrelay.sampling import GeneratedToken
from kvrelay.types import ReservationId

logger = logging.getLogger(__name__)

OnTokens = Callable[[tuple[GeneratedToken, ...]], bool]  # the next ones; whether more are wanted


class DecodeCall(Cancellable, Protocol):
    async def read(self) -> Any: ...
    async def write(self, request: Any) -> None: ...


class AnswerEvents(AsyncIterator[TokensDecoded | DecodeFinished]):
    """One answer: its tokens, then DecodeFinished. Raises what it failed with, a KVRelayError.

    Use as a context manager: leaving it ends the answer at the node, unless it has ended. It may be read as an
    iterator, which gets what came since it was last asked, or by `read`. `cancel` may be called by another task: the
    reader gets a CancelledError of kvrelay.errors.
    """

    def __init__(self) -> None:
        self._tokens: list[GeneratedToken] = []
        self._end: DecodeFinished | Exception | None = None
        self._has_told_end = False
        self._arrived = asyncio.Event()
        self._on_tokens: OnTokens | None = None
        self._leave: Callable[[], None] = _nothing
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, leave: Callable[[], None], timeout_s: float | None) -> None:
        """`leave` closes the answer on its stream."""
        self._leave = leave
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, timeout_s)

    def take(self, tokens: tuple[GeneratedToken, ...]) -> None:
        if self._on_tokens is None:
            self._tokens += tokens
            self._arrived.set()
            return
        try:
            wants_more = self._on_tokens(tokens)
        except Exception as error:  # noqa: BLE001 - raised to whoever reads this answer; others share the stream
            self._close(error)
        else:
            if not wants_more:
                self._close(None)

    def end(self, end: DecodeFinished | KVRelayError) -> None:
        self._set_end(end)

    async def read(self, on_tokens: OnTokens) -> DecodeFinished | None:
        """Has `on_tokens` called with all tokens, as they come, by the task that reads the stream: no task is woken for
        them. Returns at the end; None as soon as `on_tokens` wants no more. Raises also what `on_tokens` raised."""
        if self._tokens:
            tokens, self._tokens = tuple(self._tokens), []
            if not on_tokens(tokens):
                return None
        self._on_tokens = on_tokens
        while self._end is None and not self._has_told_end:
            self._arrived.clear()
            await self._arrived.wait()
        return self._take_end()

    def cancel(self) -> None:
        """The answer ends here and at the node."""
        self._close(CancelledError("the answer was cancelled on this side"))

    async def aclose(self) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokensDecoded | DecodeFinished:
        while not self._tokens and self._end is None:
            if self._has_told_end:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        if self._tokens:
            tokens, self._tokens = tuple(self._tokens), []
            return TokensDecoded(tokens)
        end = self._take_end()
        assert end is not None
        return end

    def _take_end(self) -> DecodeFinished | None:
        end, self._end, self._has_told_end = self._end, None, True
        if isinstance(end, Exception):
            raise end
        return end

    def _expire(self, timeout_s: float) -> None:
        self._close(DeadlineError(f"the answer was not complete within {timeout_s:g} s"))

    def _close(self, end: Exception | None) -> None:
        """Ends it on this side; None when its reader wants no more."""
        self._leave()
        self._set_end(end)

    def _set_end(self, end: DecodeFinished | Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leave = _nothing
        if self._end is None and not self._has_told_end:
            self._end, self._has_told_end = end, end is None
            self._arrived.set()


def _nothing() -> None:
    pass


class AnswerStream:
    """Opened when an answer is wanted and none is open; kept from then on, since an idle one costs nothing."""

    def __init__(self, open_call: Callable[[], DecodeCall]) -> None:
        self._open_call = open_call
        self._open: _OpenStream | None = None

    def decode(self, reservation_id: ReservationId, compute_tail: bool, timeout_s: float | None) -> AnswerEvents:
        if self._open is None or self._open.is_over:
            self._open = _OpenStream(self._open_call())
        return self._open.decode(reservation_id, compute_tail, timeout_s)

    def close(self) -> None:
        """Every open answer ends as UnavailableError."""
        if self._open is not None:
            self._open.close()


class _OpenStream:
    """One call, with a task that reads it and one that writes to it."""

    def __init__(self, call: DecodeCall) -> None:
        self._call = call
        self._answers = Demultiplexer()
        self._to_ask = asyncio.Event()
        self._writing = asyncio.create_task(self._write(), name="decode requests")
        self._reading = asyncio.create_task(self._read(), name="decode replies")
        self.is_over = False

    def decode(self, reservation_id: ReservationId, compute_tail: bool, timeout_s: float | None) -> AnswerEvents:
        events, answers = AnswerEvents(), self._answers
        handle = answers.begin(events, reservation_id, compute_tail=compute_tail, timeout_s=timeout_s or 0.0)

        def leave() -> None:
            answers.leave(handle)
            self._to_ask.set()

        events.opened(leave, timeout_s)
        self._to_ask.set()
        return events

    def close(self) -> None:
        """Does nothing once it is over."""
        self._over(lambda: UnavailableError("the decode node is gone"))

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._answers.advance(convert_decode.answers_advanced_from_pb(message))
            self._over(lambda: UnavailableError("the decode node ended its stream before the answer was complete"))
        except grpc.aio.AioRpcError as broken:
            self._over(partial(_unavailable, broken))
        except KVRelayError as senseless:
            self._over(partial(UnavailableError, f"the decode node sent what it never may: {senseless.message}"))
        except Exception:
            logger.exception("the answers of a decode node could not be taken")
        finally:  # by now over, but for a fault of ours and where the channel was closed
            self.close()

    async def _write(self) -> None:
        while True:
            while (asked := self._answers.to_ask()) is not None:
                try:
                    await self._call.write(convert_decode.answers_asked_to_pb(asked))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the stream is over; reading it says why
            self._to_ask.clear()
            await self._to_ask.wait()

    def _over(self, error: Callable[[], KVRelayError]) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._writing.cancel()
        self._call.cancel()
        self._answers.fail(error)


def _unavailable(broken: grpc.aio.AioRpcError) -> UnavailableError:
    """A stream never breaks by an answer's own fault, so each may be computed elsewhere."""
    error = error_from_rpc(broken)
    if isinstance(error, UnavailableError):
        return error
    return UnavailableError(f"the decode node broke its stream off: {error.message}")
