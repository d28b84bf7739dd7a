"""Streams one prompt's KV to the decode node that reserved blocks for it, while later chunks still compute.

BEGIN, then every block from the first one wanted as soon as its KV is final, the partial last one as TAIL, then END
with the first token. A message takes what is final when it is made, up to about 1 MiB, which is several slabs or a part
of one, and waits for no more of it; it leaves when the link's other handoffs and its pace let it, which bounds memory
and keeps pings on the same connection short, whatever the receiver's and the link's speed. Slabs are looked at just
before they are written, never sooner.

END goes alone, right behind the last blocks, and takes no turn: its answer waits for the decode engine's next step, and
must neither hold the link's room for so long nor pass for the link's speed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import (
    CancelledError,
    CorruptBlockError,
    DeadlineError,
    HandoffFailedError,
    KVRelayError,
    UnavailableError,
)
from kvrelay.kv.frame import (
    FrameKind,
    control_frame,
    encode,
)
from kvrelay.kv.hashing import Buffer
from kvrelay.messages import BlocksReceived, HandoffBegin, HandoffEnd, HandoffTarget
from kvrelay.rpc import convert_decode
from kvrelay.rpc.calls import Replies
from kvrelay.rpc.channel import cancelling
from kvrelay.types import BlockId
from prefill_node.parts import Parts
from prefill_node.progress import Progress
from prefill_node.turns import Turn, Turns

ReceiveCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """`handoff_s` runs from the first frame to the commit, `tail_s` to it from when the first token was known, which is
    when the last chunk was computed; `num_bytes` counts slabs, the partial one included."""

    handoff_s: float
    num_bytes: int
    tail_s: float


NO_HANDOFF = HandoffReport(0.0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class _Unanswered:
    num_sent: int  # whole blocks up to and with the message
    took_turn: bool  # it has blocks, or a part of one
    sent_at: float


class HandoffSender:
    """One handoff over one KVTransfer/Receive call. Raises what ended it, named after the decode node."""

    def __init__(
        self,
        call: ReceiveCall,
        turns: Turns,
        target: HandoffTarget,
        model: ModelInfo,
        sequence: Sequence,
        progress: Progress,
        view_slabs: Callable[[Seq[BlockId], int, int], Seq[Buffer]],
        *,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`turns` are of the call's connection, which may serve other handoffs. `progress` is the job's, admitted, and
        told times of `clock`. `view_slabs` is `PagedKVCache`'s.

        `stall_s` bounds how long the decode node may leave a message unanswered, from the first one on.
        """
        self._call = call
        self._turn = Turn(turns, progress.notify)
        self._target = target
        self._model = model
        self._progress = progress
        self._stall_s = stall_s
        self._clock = clock
        self._parts = Parts(model.layout, sequence, target.first_block, view_slabs)
        self._unanswered: deque[_Unanswered] = deque()
        self._answer_due = asyncio.timeout(None)
        self._end_written = False
        self._committed = False

    async def send(self) -> HandoffReport:
        """Returns once the decode node has committed. The call is over when this ends, however it ends."""
        started = self._clock()
        try:
            with closing(self._turn):
                async with self._answer_due, cancelling(self._call):
                    await self._send()
        except TimeoutError:
            raise self._stalled() from None
        ended = self._clock()
        return HandoffReport(ended - started, self._parts.num_bytes, ended - self._progress.finished_at)

    async def _send(self) -> None:
        reader = asyncio.create_task(self._read_events())
        reader.add_done_callback(lambda _: self._progress.notify())
        try:
            begin = convert_decode.handoff_begin_to_bytes(self._begin())
            await self._write(reader, encode(control_frame(FrameKind.BEGIN, begin)))
            # A write that meets the end of the call hides its reason (grpc.aio makes it INTERNAL). So no block leaves
            # before BEGIN was answered: refusals come there, and are heard.
            await self._wait(reader, lambda: not self._unanswered)
            while not self._parts.all_taken:
                await self._wait(reader, lambda: self._num_due() > 0)
                await self._write_parts(reader)
            await self._wait(reader, lambda: self._progress.first_token is not None)
            self._end_written = True
            end = convert_decode.handoff_end_to_bytes(self._end())
            await self._write(reader, encode(control_frame(FrameKind.END, end)))
            await self._wait(reader, lambda: self._committed)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    # Frames

    def _num_due(self) -> int:
        """Parts that are to leave now, as one message. With any to send this takes a place in the link's line."""
        num_waiting = self._parts.num_waiting(self._progress.num_computed_tokens)
        return self._turn.num_parts(num_waiting) if num_waiting else 0

    async def _write_parts(self, reader: asyncio.Task[None]) -> None:
        """One message of what is due. No await may come between the look at the blocks and the copy made of them."""
        frames = self._parts.take(self._progress.block_ids, self._num_due())
        message = encode(*frames)
        self._turn.sent(len(frames), self._clock())
        await self._write(reader, message, took_turn=True)

    def _begin(self) -> HandoffBegin:
        return HandoffBegin(
            reservation_id=self._target.reservation_id,
            instance_id=self._target.instance_id,
            attempt=self._target.attempt,
            model_fingerprint=self._model.fingerprint,
            layout_fingerprint=self._model.layout.fingerprint,
            first_block=self._target.first_block,
            num_blocks=self._parts.num_blocks,
        )

    def _end(self) -> HandoffEnd:
        assert self._progress.first_token is not None
        return HandoffEnd(self._parts.num_blocks_taken, self._parts.digest(), self._progress.first_token)

    # Waits; each also ends when the decode node ends the call, or leaves a message unanswered for too long

    async def _wait(self, reader: asyncio.Task[None], ready: Callable[[], bool]) -> None:
        """What the engine has to do first is bounded by the Prefill call's own deadline and the engine's watchdog."""
        await self._progress.wait_until(lambda: ready() or reader.done())
        if not ready():
            reader.result()

    async def _write(self, reader: asyncio.Task[None], message: bytes, *, took_turn: bool = False) -> None:
        self._unanswered.append(_Unanswered(self._parts.num_blocks_taken, took_turn, self._clock()))
        if len(self._unanswered) == 1:
            self._expect_answer()
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            await reader  # the call was over before; it knows why
            raise
        except grpc.aio.AioRpcError as error:
            raise self._named(UnavailableError("the KV stream broke")) from error

    def _expect_answer(self) -> None:
        """From now on, if one is due; a prompt that is slow to compute is not the decode node's fault."""
        if not self._answer_due.expired():
            due = asyncio.get_running_loop().time() + self._stall_s
            self._answer_due.reschedule(due if self._unanswered else None)

    async def _read_events(self) -> None:
        """Returns after the commit; raises whatever else ends the call."""
        try:
            async for event in Replies(self._call, convert_decode.blocks_received_from_bytes):
                self._take_answer(event)
                if event.committed:
                    break
        except KVRelayError as error:
            raise self._named(error) from error
        if not self._committed:
            raise self._named(UnavailableError("it ended the KV stream before the handoff was complete"))

    def _take_answer(self, event: BlocksReceived) -> None:
        message = self._unanswered.popleft() if self._unanswered else None
        num_blocks = message.num_sent if message is not None else None
        if message is None or event.num_blocks != num_blocks:
            raise CorruptBlockError(f"it answers for {event.num_blocks} blocks; {num_blocks} were due")
        if message.took_turn:
            self._turn.answered(self._clock())
        else:
            self._turn.arrived_before(message.sent_at, self._clock())
        self._committed = event.committed and self._end_written
        self._expect_answer()
        self._progress.notify()

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
