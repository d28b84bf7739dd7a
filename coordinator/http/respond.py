"""From a reply to bytes on a connection: whole as JSON, or in chunks as server-sent events. Who leaves is noticed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.http.errors import ClientLeftError
from coordinator.http.reply import Reply
from coordinator.response_cache import CACHE_HIT
from kvrelay.errors import KVRelayError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nothing on the way may hold events back


async def respond(request: Request, reply: Reply, *, stream: bool) -> Response:
    """A stream begins with its first chunk: what fails before that has the status of its error.

    Raises KVRelayError, or ClientLeftError when the client went.
    """
    if stream:
        return await _begin_stream(request, reply)
    try:
        return JSONResponse(await unless_left(request.receive, reply.whole()), headers=_marks(reply))
    finally:
        reply.answers.left()


async def _begin_stream(request: Request, reply: Reply) -> Response:
    chunks = reply.chunks()
    try:
        first = await unless_left(request.receive, _next(chunks))
    except BaseException:
        reply.answers.left()
        await chunks.aclose()
        raise
    return EventStream(first, chunks, reply)


async def _next(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    return await anext(chunks)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives. Raises ClientLeftError, and cancels it, when the client goes first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An error in the midst of it is its last event, and no [DONE] follows: the answer is not complete."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any], None], reply: Reply) -> None:
        super().__init__(headers=STREAM_HEADERS | _marks(reply))
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks):
                await unless_left(receive, self._write(send))
        except ClientLeftError:
            pass
        finally:
            self._reply.answers.left()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send(send, _event(self._first))
        try:
            async for chunk in self._chunks:
                await _send(send, _event(chunk))
            last = self._reply.done
        except KVRelayError as error:
            last = _event(self._reply.error(error))
        except Exception:
            logger.exception("a stream broke")
            last = _event(self._reply.error(KVRelayError("the coordinator failed; its log says why")))
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _marks(reply: Reply) -> dict[str, str]:
    return dict([CACHE_HIT]) if reply.answers.is_cached else {}


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: dict[str, Any]) -> bytes:
    """JSON has no line break in it, so it is one line of data. Events of responses have a type, which is told first."""
    name = b"event: %s\n" % value["type"].encode() if "type" in value else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
