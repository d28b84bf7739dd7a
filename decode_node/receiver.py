"""Receives KV streams: `/kvrelay.pb.KVTransfer/Receive`, raw frames in, ReceiveEvents out (docs/wire.md).

BEGIN, the blocks in order, END. Each frame is judged and its block written in one go on the event loop, right after
the reservation was asked whether it still stands; nothing is committed before END has proven the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from decode_node.handoff import HandoffChecker, check_identity
from decode_node.node import DecodeNode, Request
from kvrelay.errors import CorruptBlockError, KVRelayError, StaleError
from kvrelay.kv.frame import Frame, FrameKind, decode
from kvrelay.rpc import convert
from kvrelay.types import BlocksReceived, HandoffBegin, check_token_id

Context = grpc.aio.ServicerContext[Any, Any]


class Receiver:
    """One instance serves every stream of the node."""

    def __init__(self, node: DecodeNode) -> None:
        self._node = node

    async def receive(self, messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """One handoff; answers every frame. Raises StaleError, ForeignBlockError, CorruptBlockError and the like."""
        try:
            begin = self._begin(await _first(messages))
            async for event in self._receive(begin, messages):
                yield convert.blocks_received_to_bytes(event)
        except KVRelayError as error:
            self._node.metrics.handoff_refused(error)
            raise

    def _begin(self, frame: Frame) -> HandoffBegin:
        if frame.kind is not FrameKind.BEGIN:
            raise CorruptBlockError(f"a KV stream starts with BEGIN, not {frame.kind.name}")
        begin = convert.handoff_begin_from_bytes(bytes(frame.payload))
        check_identity(begin, self._node.instance_id, self._node.info)
        return begin
