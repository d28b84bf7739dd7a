"""Calls that speak our types: failures are KVRelayErrors, and nothing is left running on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc

from kvrelay.errors import CancelledError, KVRelayError
from kvrelay.rpc.channel import Cancellable, cancelling, error_from_rpc

T = TypeVar("T")


class UnaryCall(Cancellable, Protocol):
    def __await__(self) -> Any: ...
    def cancelled(self) -> bool: ...


class StreamCall(Cancellable, Protocol):
    async def read(self) -> Any: ...
    def cancelled(self) -> bool: ...


async def answer(call: UnaryCall, from_pb: Callable[[Any], T]) -> T:
    """The reply of a call that has one. Raises KVRelayError."""
    async with cancelling(call):
        try:
            reply = await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise _translated(error, call) from error
        return from_pb(reply)


class Replies(AsyncIterator[T], Generic[T]):
    """The replies of a call that has many. Raises KVRelayError.

    Use as a context manager, so that leaving the loop by `break` or an exception cancels the call at once; without one
    the call ends when the object is dropped. `cancel` may be called by another task: the reader gets a CancelledError
    of kvrelay.errors.
    """

    def __init__(self, call: StreamCall, from_pb: Callable[[Any], T]) -> None:
        self._call = call
        self._from_pb = from_pb

    def cancel(self) -> None:
        self._call.cancel()

    async def aclose(self) -> None:
        self._call.cancel()

    def __del__(self) -> None:
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise _translated(error, self._call) from error
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._from_pb(message)


def _translated(
    error: grpc.aio.AioRpcError | asyncio.CancelledError, call: UnaryCall | StreamCall
) -> KVRelayError | asyncio.CancelledError:
    """grpc.aio also raises asyncio.CancelledError where only the call was cancelled and not the task that reads it."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_rpc(error)
    task = asyncio.current_task()
    if call.cancelled() and task is not None and not task.cancelling():
        return CancelledError("the call was cancelled on this side")
    return error
