"""Receives KV streams: `/kvrelay.pb.KVTransfer/Receive`, raw frames in, ReceiveEvents out (docs/wire.md).

BEGIN, the blocks in order, END. Each message is judged and its blocks written in one go on the event loop, right after
the reservation was asked whether it still stands; nothing is committed before END has proven the whole.

The wait for BEGIN ends with a lease's time. Every later one ends with the reservation, which its lease bounds or, while
someone reads its answer, the answer's time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from decode_node.handoff import HandoffChecker, check_identity
from decode_node.node import DecodeNode, Request
from kvrelay.errors import CorruptBlockError, DeadlineError, StaleError
from kvrelay.kv.frame import MAX_PART_BYTES, Frame, FrameKind, decode
from kvrelay.messages import BlocksReceived, HandoffBegin, HandoffEnd
from kvrelay.rpc import convert_decode
from kvrelay.types import check_token_id


class Receiver:
    """One instance serves every stream of the node."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._slab_bytes = node.info.layout.slab_bytes
        self._max_payload_bytes = min(self._slab_bytes, MAX_PART_BYTES)

    async def receive(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[BlocksReceived]:
        """One handoff; answers every message. Raises StaleError, ForeignBlockError, CorruptBlockError and the like.

        However it ends, short of a commit, the reservation is free for another attempt.
        """
        node = self._node
        begin = await self._begin(messages)
        request = node.begin_receive(begin.reservation_id, begin.attempt)
        started = node.clock()
        try:
            checker = HandoffChecker(begin, request.entry.sequence, request.entry.num_cached, self._slab_bytes)
            yield BlocksReceived(0, committed=False)
            with _reading(messages, request.interrupted) as reader:
                while (end := self._take(begin, request, checker, await reader.next())) is None:
                    yield BlocksReceived(checker.num_received, committed=False)
            # Shielded: the engine commits whether or not the sender stays to hear of it.
            await asyncio.shield(node.begin_commit(begin.reservation_id, begin.attempt, end.first_token))
            node.metrics.handed_over(checker.num_received * self._slab_bytes, node.clock() - started)
            yield BlocksReceived(checker.num_received, committed=True)
        finally:
            node.reservations.break_receive(begin.reservation_id, begin.attempt)

    async def _begin(self, messages: AsyncIterator[bytes]) -> HandoffBegin:
        limit_s = self._node.reservations.lease_s
        try:
            async with asyncio.timeout(limit_s):
                message = await _next(messages)
        except TimeoutError:
            raise DeadlineError(f"no BEGIN came within {limit_s:g} s") from None
        frame, *others = self._decode(message)
        if frame.kind is not FrameKind.BEGIN:
            raise CorruptBlockError(f"a KV stream starts with BEGIN, not {frame.kind.name}")
        if others:
            raise CorruptBlockError("BEGIN comes in a message of its own: no block may follow before it is answered")
        begin = convert_decode.handoff_begin_from_bytes(memoryview(frame.payload))
        check_identity(begin, self._node.instance_id, self._node.info)
        return begin

    def _take(
        self, begin: HandoffBegin, request: Request, checker: HandoffChecker, message: bytes | None
    ) -> HandoffEnd | None:
        """Writes a message's blocks, or its part of one; END's content if it is the last of them.

        Nothing is awaited between the question whether the reservation stands and the last write.
        """
        node = self._node
        node.reservations.check_receive(begin.reservation_id, begin.attempt, node.clock())
        if message is None:  # interrupted: whatever the reservation says, this stream has no more to read
            raise StaleError(f"attempt {begin.attempt} of reservation {begin.reservation_id} was interrupted")
        frames, num_received = self._decode(message), checker.num_received
        end = frames.pop() if frames[-1].kind is FrameKind.END else None
        for frame in frames:
            index = checker.accept(frame)
            node.cache.write_part(request.entry.block_ids[index], frame.payload, frame.offset_bytes)
        node.metrics.blocks_received(checker.num_received - num_received)
        return self._end(end, checker) if end is not None else None

    def _decode(self, message: bytes) -> list[Frame]:
        return decode(message, max_payload_bytes=self._max_payload_bytes, parts=True)

    def _end(self, frame: Frame, checker: HandoffChecker) -> HandoffEnd:
        end = convert_decode.handoff_end_from_bytes(memoryview(frame.payload))
        checker.finish(end)
        check_token_id("first_token_id", end.first_token.token_id, self._node.info.vocab_size)
        return end


class _Reader:
    """Reads one stream after its BEGIN. One task, for the whole of it, ends the read under way once that is of no use:
    two tasks a message would cost more than half of what a message costs besides."""

    def __init__(self, messages: AsyncIterator[bytes], interrupted: asyncio.Event) -> None:
        self._messages = messages
        self._interrupted = interrupted
        self._read: asyncio.Timeout | None = None  # under way

    async def next(self) -> bytes | None:
        """The next message; None once `interrupted` is set."""
        if self._interrupted.is_set():
            return None
        try:
            async with asyncio.timeout(None) as self._read:
                return await _next(self._messages)
        except TimeoutError:
            return None
        finally:
            self._read = None

    async def end_read(self) -> None:
        await self._interrupted.wait()
        if self._read is not None:
            self._read.reschedule(0)  # long past: at once


@contextmanager
def _reading(messages: AsyncIterator[bytes], interrupted: asyncio.Event) -> Iterator[_Reader]:
    reader = _Reader(messages, interrupted)
    ending = asyncio.create_task(reader.end_read())
    try:
        yield reader
    finally:
        ending.cancel()


async def _next(messages: AsyncIterator[bytes]) -> bytes:
    """grpc shows a stream that was cut off as one that ended, so an end without END is an error."""
    message = await anext(messages, None)
    if message is None:
        raise CorruptBlockError("the KV stream ended before its END frame; nothing of it is used")
    return message
