"""Prefill and decode nodes without a model: what a coordinator asks them, answered from memory at a settable pace.

A decode node's answers advance together, as the rows of a batch do: at a pace, those of one node have their tokens at
the same moments. Each token is an event of its own; its id says when it left (bench/coordinator/stamps.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.coordinator.stamps import VOCAB_SIZE, stamp
from kvrelay.cluster import ModelInfo, NodeInfo, NodeStatus
from kvrelay.errors import OverloadedError
from kvrelay.kv.layout import KVLayout
from kvrelay.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from kvrelay.rpc.memberships import Memberships
from kvrelay.rpc.server import make_server
from kvrelay.types import BlockCounts, InstanceId, Role

MODEL = ModelInfo(
    name="nothing",
    fingerprint="f1" * 32,
    architecture="llama",
    max_model_len=2**22,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(),
    layout=KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),
    dtype="bfloat16",
    attention_backend="none",
)
NUM_SLOTS = 100_000
DIRECT = "direct"  # a reservation that every decode node has, for answers without end
ENDLESS = 2**62


@dataclass(slots=True)
class Reservation:
    num_tokens: int  # of the answer
    num_blocks: int
    committed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeNode:
    role: Role

    def __init__(self, number: int) -> None:
        self.instance_id = InstanceId(f"{self.role.value}-{number}")
        self.address = ""
        self._server = make_server()
        self._memberships: Memberships | None = None

    async def start(self, coordinators: list[str]) -> None:
        """Serves, and joins as soon as they can be reached."""
        self.register(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        info = NodeInfo(self.role, self.instance_id, self.address, MODEL)
        self._memberships = Memberships(coordinators, info, self.status)
        await self._memberships.start()

    async def stop(self) -> None:
        if self._memberships is not None:
            await self._memberships.close()
        await self._server.stop(None)

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def status(self) -> NodeStatus:
        raise NotImplementedError


class FakeDecodeNode(FakeNode, decode_pb2_grpc.DecodeServicer):
    """`pace` gives the tokens a second of each answer, asked before each; 0: as fast as they are taken."""

    role = Role.DECODE_NODE

    def __init__(self, number: int, num_blocks: int, phase: float, pace: Callable[[], float]) -> None:
        """`phase`, in [0, 1), is where in the time between two tokens this node's steps are."""
        super().__init__(number)
        self.reservations: dict[str, Reservation] = {}
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._phase = phase
        self._pace = pace
        self._numbers = itertools.count(1)

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    def status(self) -> NodeStatus:
        blocks = BlockCounts(self._num_blocks, free=self._num_free, held=self._num_blocks - self._num_free)
        return NodeStatus(ready=True, blocks=blocks, num_running=len(self.reservations), num_slots_free=NUM_SLOTS)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveReply:
        num_blocks = MODEL.layout.blocks_for(request.num_tokens)
        if num_blocks > self._num_free:
            raise OverloadedError(f"{num_blocks} blocks are not to be had now")
        self._num_free -= num_blocks
        reservation_id = f"{self.instance_id}/{next(self._numbers)}"
        self.reservations[reservation_id] = Reservation(request.request.sampling.max_tokens, num_blocks)
        return decode_pb2.ReserveReply(
            reservation_id=reservation_id, instance_id=self.instance_id, num_cached_blocks=0, lease_s=10.0
        )

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Any) -> decode_pb2.ReleaseReply:
        self._drop(request.reservation_id)
        return decode_pb2.ReleaseReply()

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[decode_pb2.DecodeEvent]:
        num_tokens = ENDLESS
        if request.reservation_id != DIRECT:
            reservation = self.reservations[request.reservation_id]
            num_tokens = reservation.num_tokens
            if not request.compute_tail:
                await reservation.committed.wait()
        try:
            async for token_id in self._token_ids(num_tokens):
                yield decode_pb2.DecodeEvent(tokens=decode_pb2.TokensDecoded(token_ids=(token_id,)))
            finished = decode_pb2.DecodeFinished(reason=types_pb2.FINISH_REASON_LENGTH)
            yield decode_pb2.DecodeEvent(finished=finished)
        finally:
            self._drop(request.reservation_id)

    async def _token_ids(self, num_tokens: int) -> AsyncIterator[int]:
        loop, step_at = asyncio.get_running_loop(), 0.0
        for _ in range(num_tokens):
            if tokens_per_s := self._pace():
                step_at = self._next_step(max(loop.time(), step_at + 0.5 / tokens_per_s), tokens_per_s)
                await asyncio.sleep(step_at - loop.time())
            yield stamp()

    def _next_step(self, after: float, steps_per_s: float) -> float:
        return (math.floor(after * steps_per_s - self._phase) + 1 + self._phase) / steps_per_s

    def _drop(self, reservation_id: str) -> None:
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is not None:
            self._num_free += reservation.num_blocks


class FakePrefillNode(FakeNode, prefill_pb2_grpc.PrefillServicer):
    """Has computed every prompt before it was asked."""

    role = Role.PREFILL_NODE

    def __init__(self, number: int, decode_nodes: list[FakeDecodeNode]) -> None:
        super().__init__(number)
        self._decode_nodes = decode_nodes

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    def status(self) -> NodeStatus:
        return NodeStatus(ready=True, blocks=BlockCounts(2**31, free=2**31), num_slots_free=NUM_SLOTS)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted())
        for node in self._decode_nodes:
            if reservation := node.reservations.get(request.target.reservation_id):
                reservation.committed.set()
        yield prefill_pb2.PrefillEvent(finished=prefill_pb2.PrefillFinished(first_token_id=stamp()))
