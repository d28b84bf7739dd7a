"""A KV receiver for sender tests: takes frames, keeps them, acknowledges when told to, fails when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvrelay.errors import KVRelayError
from kvrelay.kv.frame import Frame, FrameKind, decode, verify
from kvrelay.kv.hashing import ChecksumChain
from kvrelay.messages import BlocksReceived, HandoffBegin, HandoffEnd
from kvrelay.rpc import convert_decode, raw

MAX_PAYLOAD_BYTES = 4 << 20


class FakeReceiver:
    """Serves /kvrelay.pb.KVTransfer/Receive. It proves every frame and commits, unless told otherwise."""

    def __init__(self) -> None:
        self.begin: HandoffBegin | None = None
        self.end: HandoffEnd | None = None
        self.blocks: list[Frame] = []  # or parts of them
        self.slab_bytes = 0  # where slabs come in parts; 0: each is one
        self.messages: list[int] = []  # their lengths
        self.refusal: KVRelayError | None = None  # raised on BEGIN
        self.fail_after: int | None = None  # blocks after which the stream ends, without commit
        self.failure: KVRelayError | None = None  # how it ends then; None: as if all were well
        self.end_failure: KVRelayError | None = None  # raised on END, instead of the answer
        self.miscount = 0  # added to the blocks of each answer but BEGIN's
        self.may_acknowledge = asyncio.Event()
        self.may_acknowledge.set()
        self.hold_commit_only = False  # acknowledge blocks at once, but not END
        self.committed = False
        self.arrived = asyncio.Condition()
        self.num_open = 0

    def handler(self) -> Any:
        return raw.raw_methods(raw.KV_TRANSFER, stream_stream={"Receive": self.receive})

    async def receive(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            async for message in messages:
                self.messages.append(len(message))
                kinds = set()
                for frame in decode(message, max_payload_bytes=MAX_PAYLOAD_BYTES, parts=True):
                    verify(frame)
                    kinds.add(frame.kind)
                    reply = await self._take(frame)
                    if reply is None:
                        return
                if FrameKind.END in kinds or (FrameKind.BEGIN not in kinds and not self.hold_commit_only):
                    await self.may_acknowledge.wait()
                self.committed = reply.committed
                yield convert_decode.blocks_received_to_bytes(reply)
        finally:
            self.num_open -= 1
            async with self.arrived:
                self.arrived.notify_all()

    async def wait_for_blocks(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.blocks) >= count)

    async def wait_for_end(self) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.end is not None)

    async def wait_for_close(self) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.num_open == 0)

    async def _take(self, frame: Frame) -> BlocksReceived | None:
        if frame.kind is FrameKind.BEGIN:
            self.begin = convert_decode.handoff_begin_from_bytes(frame.payload)
            if self.refusal is not None:
                raise self.refusal
            return BlocksReceived(0, committed=False)
        if frame.kind is FrameKind.END:
            reply = self._finish(convert_decode.handoff_end_from_bytes(frame.payload))
            if self.end_failure is not None:
                raise self.end_failure
            async with self.arrived:
                self.arrived.notify_all()
            return reply
        async with self.arrived:
            self.blocks.append(frame)
            self.arrived.notify_all()
        if self.fail_after == len(self.blocks):
            if self.failure is not None:
                raise self.failure
            return None
        return BlocksReceived(self._num_blocks + self.miscount, committed=False)

    @property
    def _num_blocks(self) -> int:
        """Whole ones."""
        ends = [frame.offset_bytes + len(frame.payload) for frame in self.blocks]
        return sum(not self.slab_bytes or end == self.slab_bytes for end in ends)

    def _finish(self, end: HandoffEnd) -> BlocksReceived:
        chain = ChecksumChain()
        for frame in self.blocks:
            chain.add(frame.checksum)
        assert (end.num_blocks, end.checksum) == (self._num_blocks, chain.digest())
        self.end = end
        return BlocksReceived(self._num_blocks + self.miscount, committed=True)
