"""Streams one prompt's KV to the decode node that reserved blocks for it, while later chunks still compute.

BEGIN, then every block from the first one wanted as soon as its KV is final, the partial last one as TAIL, then END
with the first token. At most WINDOW blocks are on the way unacknowledged: that bounds memory, whatever the receiver's
pace, and keeps pings on the same connection short. A slab is read just before it is written, never sooner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import CancelledError, DeadlineError, HandoffFailedError, KVRelayError, UnavailableError
from kvrelay.kv.frame import Frame, FrameKind, block_frame, control_frame, encode, tail_frame
from kvrelay.kv.hashing import ChecksumChain
from kvrelay.messages import HandoffBegin, HandoffEnd, HandoffTarget
from kvrelay.rpc import convert_decode
from kvrelay.rpc.calls import Replies
from kvrelay.rpc.channel import cancelling
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId
from prefill_node.progress import Progress

WINDOW = 2  # blocks on the way; a third gains no throughput and costs latency to everyone on the connection

ReceiveCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """`handoff_s` runs from the first frame to the commit; `num_bytes` counts slabs, the partial one included."""

    handoff_s: float
    num_bytes: int


class HandoffSender:
    """One handoff over one KVTransfer/Receive call. Raises what ended it, named after the decode node."""

    def __init__(
        self,
        call: ReceiveCall,
        target: HandoffTarget,
        model: ModelInfo,
        sequence: Sequence,
        progress: Progress,
        read_slab: Callable[[BlockId], bytes],
        *,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`progress` is the job's, admitted; `stall_s` bounds each wait for the decode node."""
        self._call = call
        self._target = target
        self._model = model
        self._num_tokens = sequence.num_tokens
        self._hashes = sequence.block_hashes
        self._progress = progress
        self._read_slab = read_slab
        self._stall_s = stall_s
        self._clock = clock
        self._chain = ChecksumChain()
        self._num_sent = 0
        self._num_bytes = 0
        self._accepted = False  # the decode node answered BEGIN
        self._num_received = 0  # as the decode node says
        self._end_written = False
        self._committed = False

    async def send(self) -> HandoffReport:
        """Returns once the decode node has committed. The call is over when this ends, however it ends."""
        started = self._clock()
        async with cancelling(self._call):
            reader = asyncio.create_task(self._read_events())
            reader.add_done_callback(lambda _: self._progress.notify())
            try:
                await self._write_frames(reader)
                await self._wait_for_peer(reader, lambda: self._committed)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        return HandoffReport(self._clock() - started, self._num_bytes)

    async def _write_frames(self, reader: asyncio.Task[None]) -> None:
        await self._write(reader, control_frame(FrameKind.BEGIN, convert_decode.handoff_begin_to_bytes(self._begin())))
        # A write that meets the end of the call hides its reason (grpc.aio makes it INTERNAL). So no block leaves
        # before BEGIN was answered: refusals come there, and are heard.
        await self._wait_for_peer(reader, lambda: self._accepted)
        for index in range(self._target.first_block, self._num_blocks):
            await self._wait_for_kv(reader, self._end_of(index))
            await self._wait_for_peer(reader, lambda: self._num_sent - self._num_received < WINDOW)
            frame = self._frame(index)
            self._chain.add(frame.checksum)
            self._num_sent += 1
            self._num_bytes += len(frame.payload)
            await self._write(reader, frame)
        await self._wait_for_engine(reader, lambda: self._progress.first_token is not None)
        assert self._progress.first_token is not None
        end = self._end(self._progress.first_token)
        self._end_written = True
        await self._write(reader, control_frame(FrameKind.END, convert_decode.handoff_end_to_bytes(end)))

    # Frames

    @property
    def _num_blocks(self) -> int:
        return self._model.layout.blocks_for(self._num_tokens)

    def _end_of(self, index: int) -> int:
        """Positions that must be final before block `index` may leave."""
        return min((index + 1) * self._model.layout.block_tokens, self._num_tokens)

    def _begin(self) -> HandoffBegin:
        return HandoffBegin(
            reservation_id=self._target.reservation_id,
            instance_id=self._target.instance_id,
            attempt=self._target.attempt,
            model_fingerprint=self._model.fingerprint,
            layout_fingerprint=self._model.layout.fingerprint,
            first_block=self._target.first_block,
            num_blocks=self._num_blocks - self._target.first_block,
        )

    def _frame(self, index: int) -> Frame:
        slab = self._read_slab(self._progress.block_ids[index])
        if index < len(self._hashes):
            return block_frame(index, self._hashes[index], slab)
        num_tail_tokens = self._num_tokens - index * self._model.layout.block_tokens
        return tail_frame(index, num_tail_tokens, self._model.layout.without_rest(slab, num_tail_tokens))

    def _end(self, first_token: GeneratedToken) -> HandoffEnd:
        return HandoffEnd(self._num_sent, self._chain.digest(), first_token)

    # Waits; each also ends when the decode node ends the call

    async def _wait_for_kv(self, reader: asyncio.Task[None], num_tokens: int) -> None:
        await self._wait_for_engine(reader, lambda: self._progress.num_computed_tokens >= num_tokens)

    async def _wait_for_engine(self, reader: asyncio.Task[None], ready: Callable[[], bool]) -> None:
        """Bounded by the Prefill call's own deadline and the engine's watchdog."""
        await self._progress.wait_until(lambda: ready() or reader.done())
        if not ready():
            reader.result()

    async def _wait_for_peer(self, reader: asyncio.Task[None], ready: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._progress.wait_until(lambda: ready() or reader.done())
        except TimeoutError:
            raise self._stalled() from None
        if not ready():
            reader.result()

    async def _write(self, reader: asyncio.Task[None], frame: Frame) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._call.write(encode(frame))
        except TimeoutError:
            raise self._stalled() from None
        except asyncio.InvalidStateError:
            await reader  # the call was over before; it knows why
            raise
        except grpc.aio.AioRpcError as error:
            raise self._named(UnavailableError("the KV stream broke")) from error

    async def _read_events(self) -> None:
        """Returns after the commit; raises whatever else ends the call."""
        try:
            async for event in Replies(self._call, convert_decode.blocks_received_from_bytes):
                self._accepted = True
                self._num_received = event.num_blocks
                self._committed = event.committed and self._end_written
                self._progress.notify()
                if event.committed:
                    break
        except KVRelayError as error:
            raise self._named(error) from error
        if not self._committed:
            raise self._named(UnavailableError("it ended the KV stream before the handoff was complete"))

    def _stalled(self) -> KVRelayError:
        return self._named(UnavailableError(f"no progress on the KV stream for {self._stall_s:g} s"))

    def _named(self, error: KVRelayError) -> KVRelayError:
        """Says that the way to the decode node failed, not this node. A call cancelled under us means that it is going
        away; what it refused in so many words keeps its kind."""
        if isinstance(error, CancelledError | UnavailableError | DeadlineError):
            error = HandoffFailedError(error.message)
        error.message = f"decode node {self._target.address}: {error.message}"
        error.args = (error.message,)
        return error
