"""The Decode stream of a fake decode node, each answer of which a generator gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from kvrelay.errors import KVRelayError
from kvrelay.messages import AnswersAdvanced, AnswerWanted, DecodeFinished, TokensDecoded
from kvrelay.pb import decode_pb2
from kvrelay.rpc import convert_decode
from kvrelay.types import AnswerHandle

AnswerEvents = AsyncGenerator[TokensDecoded | DecodeFinished]


async def answers(
    requests: AsyncIterator[decode_pb2.DecodeRequest], answer: Callable[[AnswerWanted], AnswerEvents]
) -> AsyncIterator[decode_pb2.DecodeReply]:
    """An answer that is left has its generator closed, as all have when the stream ends. What one raises is its end.
    None goes on before what it gave is written."""
    replies: asyncio.Queue[AnswersAdvanced | None] = asyncio.Queue()
    running: dict[AnswerHandle, asyncio.Task[None]] = {}

    async def run(wanted: AnswerWanted) -> None:
        try:
            async with aclosing(answer(wanted)) as events:
                async for event in events:
                    replies.put_nowait(_advanced(wanted.handle, event))
                    await replies.join()
        except KVRelayError as error:
            replies.put_nowait(_advanced(wanted.handle, error))

    async def read() -> None:
        try:
            async for request in requests:
                asked = convert_decode.answers_asked_from_pb(request)
                running.update({wanted.handle: asyncio.create_task(run(wanted)) for wanted in asked.wanted})
                for handle in asked.left:
                    running[handle].cancel()
        finally:
            replies.put_nowait(None)

    reading = asyncio.create_task(read())
    try:
        while (advanced := await replies.get()) is not None:
            yield convert_decode.answers_advanced_to_pb(advanced)
            replies.task_done()
    finally:
        for task in (reading, *running.values()):
            task.cancel()
        await asyncio.gather(reading, *running.values(), return_exceptions=True)


def _advanced(handle: AnswerHandle, event: TokensDecoded | DecodeFinished | KVRelayError) -> AnswersAdvanced:
    if isinstance(event, TokensDecoded):
        return AnswersAdvanced(tokens=((handle, event.tokens),))
    return AnswersAdvanced(ended=((handle, event),))
