"""Prefill and decode nodes without a model: what a coordinator asks them, answered from memory at a settable pace.

A decode node's answers advance together, as the rows of a batch do: a step gives each a token, and all of them are one
message. A token's id says when it left (bench/coordinator/stamps.py).
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


class Batch:
    """Answers that one caller reads, those whose prompt is here."""

    def __init__(self) -> None:
        self.num_left: dict[int, int] = {}  # tokens, by handle
        self.reservation_ids: dict[int, str] = {}
        self.has_some = asyncio.Event()

    def add(self, handle: int, num_tokens: int) -> None:
        if handle in self.reservation_ids:  # else it was left before its prompt was here
            self.num_left[handle] = num_tokens
            self.has_some.set()

    def remove(self, handle: int) -> str:
        """Its reservation, or nothing once it is removed."""
        self.num_left.pop(handle, None)
        if not self.num_left:
            self.has_some.clear()
        return self.reservation_ids.pop(handle, "")

    def step(self) -> decode_pb2.DecodeReply:
        """A token of each answer, and the end of those that have all."""
        handles, token_id = list(self.num_left), stamp()
        ended = []
        for handle in handles:
            self.num_left[handle] -= 1
            if not self.num_left[handle]:
                finished = decode_pb2.DecodeFinished(reason=types_pb2.FINISH_REASON_LENGTH)
                ended.append(decode_pb2.AnswerEnded(handle=handle, finished=finished))
        return decode_pb2.DecodeReply(handles=handles, token_ids=[token_id] * len(handles), ended=ended)


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

    async def Decode(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeReply]:
        batch, step_at = Batch(), 0.0
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(requests, batch, tasks))
            try:
                while True:
                    await batch.has_some.wait()
                    step_at = await self._until_step(step_at)
                    reply = batch.step()
                    for ended in reply.ended:
                        self._drop(batch.remove(ended.handle))
                    yield reply
            finally:
                reading.cancel()
                for reservation_id in batch.reservation_ids.values():
                    self._drop(reservation_id)

    async def _read(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], batch: Batch, tasks: asyncio.TaskGroup
    ) -> None:
        async for request in requests:
            for wanted in request.wanted:
                batch.reservation_ids[wanted.handle] = wanted.reservation_id
                if wanted.reservation_id == DIRECT:
                    batch.add(wanted.handle, ENDLESS)
                else:
                    tasks.create_task(self._join(wanted, batch))
            for handle in request.left:
                self._drop(batch.remove(handle))

    async def _join(self, wanted: decode_pb2.AnswerWanted, batch: Batch) -> None:
        reservation = self.reservations[wanted.reservation_id]
        if not wanted.compute_tail:
            await reservation.committed.wait()
        batch.add(wanted.handle, reservation.num_tokens)

    async def _until_step(self, last_at: float) -> float:
        """When it is."""
        loop, tokens_per_s = asyncio.get_running_loop(), self._pace()
        if not tokens_per_s:
            return last_at
        step_at = self._next_step(max(loop.time(), last_at + 0.5 / tokens_per_s), tokens_per_s)
        await asyncio.sleep(step_at - loop.time())
        return step_at

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
