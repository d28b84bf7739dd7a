"""Receives KV streams: `/kvrelay.pb.KVTransfer/Receive`, raw frames in, ReceiveEvents out (docs/wire.md).

BEGIN, the blocks in order, END. Each frame is judged and its block written in one go on the event loop, right after
the reservation was asked whether it still stands; nothing is committed before END has proven the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from decode_node.handoff import HandoffChecker, check_identity
from decode_node.node import DecodeNode
from kvrelay.errors import CorruptBlockError
from kvrelay.kv.frame import Frame, FrameKind, decode
from kvrelay.messages import BlocksReceived, HandoffBegin, HandoffEnd
from kvrelay.rpc import convert_decode
from kvrelay.types import check_token_id


class Receiver:
    """One instance serves every stream of the node."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node
        self._slab_bytes = node.info.layout.slab_bytes

    async def receive(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[BlocksReceived]:
        """One handoff; answers every frame. Raises StaleError, ForeignBlockError, CorruptBlockError and the like.

        However it ends, short of a commit, the reservation is free for another attempt.
        """
        node = self._node
        begin = self._begin(await _read(messages, self._slab_bytes))
        request = node.begin_receive(begin.reservation_id, begin.attempt)
        started = node.clock()
        try:
            checker = HandoffChecker(begin, request.entry.sequence, request.entry.num_cached, self._slab_bytes)
            yield BlocksReceived(0, committed=False)
            async with aclosing(self._frames(begin, request.interrupted, messages)) as frames:
                async for frame in frames:
                    if frame.kind is FrameKind.END:
                        break
                    index = checker.accept(frame)
                    node.cache.write_slab(request.entry.block_ids[index], frame.payload)
                    node.metrics.block_received()
                    yield BlocksReceived(checker.num_received, committed=False)
            end = self._end(frame, checker)
            # Shielded: the engine commits whether or not the sender stays to hear of it.
            await asyncio.shield(node.begin_commit(begin.reservation_id, begin.attempt, end.first_token))
            node.metrics.handed_over(checker.num_received * self._slab_bytes, node.clock() - started)
            yield BlocksReceived(checker.num_received, committed=True)
        finally:
            node.reservations.break_receive(begin.reservation_id, begin.attempt)

    def _begin(self, frame: Frame) -> HandoffBegin:
        if frame.kind is not FrameKind.BEGIN:
            raise CorruptBlockError(f"a KV stream starts with BEGIN, not {frame.kind.name}")
        begin = convert_decode.handoff_begin_from_bytes(memoryview(frame.payload))
        check_identity(begin, self._node.instance_id, self._node.info)
        return begin

    async def _frames(
        self, begin: HandoffBegin, interrupted: asyncio.Event, messages: AsyncIterator[bytes]
    ) -> AsyncGenerator[Frame]:
        """Frames that may still be written when they are yielded: the user must do it before it awaits anything."""
        while True:
            frame = await _read_unless(interrupted, messages, self._slab_bytes)
            self._node.reservations.check_receive(begin.reservation_id, begin.attempt, self._node.clock())
            if frame is not None:
                yield frame

    def _end(self, frame: Frame, checker: HandoffChecker) -> HandoffEnd:
        end = convert_decode.handoff_end_from_bytes(memoryview(frame.payload))
        checker.finish(end)
        check_token_id("first_token_id", end.first_token.token_id, self._node.info.vocab_size)
        return end


async def _read(messages: AsyncIterator[bytes], slab_bytes: int) -> Frame:
    """The next frame. grpc shows a stream that was cut off as one that ended, so an end without END is an error."""
    message = await anext(messages, None)
    if message is None:
        raise CorruptBlockError("the KV stream ended before its END frame; nothing of it is used")
    return decode(message, max_payload_bytes=slab_bytes)


async def _read_unless(interrupted: asyncio.Event, messages: AsyncIterator[bytes], slab_bytes: int) -> Frame | None:
    """The next frame, or None once `interrupted` is set."""
    read = asyncio.ensure_future(_read(messages, slab_bytes))
    interrupt = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait((read, interrupt), return_when=asyncio.FIRST_COMPLETED)
        return read.result() if read.done() else None
    finally:
        interrupt.cancel()
        read.cancel()
