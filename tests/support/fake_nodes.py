"""Prefill and decode nodes without a model, on real gRPC servers: they follow a script and know what they hold.

The n-th token of any answer is `ANSWER_IDS[n]` (of a node's own `answer_ids`, where it serves another model), wherever
it is computed, so an answer put together from two nodes can be compared with the whole. A node that is asked to go on
after wrong tokens refuses.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from kvrelay.cluster import ModelInfo, NodeInfo, NodeRates, NodeStatus
from kvrelay.errors import (
    AlreadyCommittedError,
    InvalidRequestError,
    KVRelayError,
    NotFoundError,
    OverloadedError,
    StaleError,
)
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.named_blocks import NamedBlocks
from kvrelay.messages import (
    AnswerWanted,
    DecodeFinished,
    HandoffTarget,
    NodeRequest,
    PrefillFinished,
    PrefillStarted,
    ReservationGranted,
    TokensDecoded,
)
from kvrelay.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert_decode, convert_prefill
from kvrelay.rpc.credentials import PeerTLS
from kvrelay.rpc.memberships import Memberships
from kvrelay.rpc.node_service import NodeService
from kvrelay.rpc.server import bind, make_server
from kvrelay.sampling import GeneratedToken, StepLogprobs, TokenLogprob
from kvrelay.types import BlockCounts, CachedTokens, FinishReason, InstanceId, ReservationId, Role
from tests.support.answer_generators import AnswerEvents, answers
from tests.support.byte_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE

# "The answer is 42, whatever the question was." in bytes, each character's id, and then the end of the sequence.
ANSWER_TEXT = "The answer is 42, whatever the question was."
BLOCK_TOKENS = 16
MODEL = ModelInfo(
    name="bytes",
    fingerprint="f1" * 32,
    architecture="llama",
    max_model_len=1024,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS_TOKEN_ID,),
    layout=KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=BLOCK_TOKENS),
    dtype="float32",
    attention_backend="none",
)


def byte_ids(text: str) -> tuple[int, ...]:
    """Ids of printable ASCII text: the byte-level alphabet starts with "!" at id 3 and keeps their order; a blank is
    written as its 221st character."""
    return tuple(3 + (220 if char == " " else ord(char) - ord("!")) for char in text)


ANSWER_IDS = (*byte_ids(ANSWER_TEXT), EOS_TOKEN_ID)


class Stage:
    """What a node can be told to do when it gets somewhere: fail, or wait until the test lets it go on."""

    def __init__(self) -> None:
        self.failures: list[KVRelayError | None] = []  # one is taken, and raised, each time it is reached
        self.gate = asyncio.Event()
        self.gate.set()

    def hold(self) -> None:
        self.gate.clear()

    def let_go(self) -> None:
        self.gate.set()

    async def pass_through(self) -> None:
        await self.gate.wait()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure


class FakeNode:
    """A member of the cluster on a port of its own."""

    role: Role
    stages: tuple[str, ...]

    def __init__(self, instance_id: str, num_blocks: int) -> None:
        self.instance_id = InstanceId(instance_id)
        self.num_blocks = num_blocks
        self.num_slots_free = 4
        self.num_waiting_tokens = 0
        self.rates = NodeRates()  # what it says it measured
        self.ready = True
        self.draining = False
        self.model: ModelInfo = MODEL
        self.answer_ids: tuple[int, ...] = ANSWER_IDS
        self.cached_blocks: NamedBlocks | None = None  # what it tells coordinators of; None: nothing, as older ones do
        self.at = {name: Stage() for name in self.stages}
        self.reached: Counter[str] = Counter()
        self.requests: list[NodeRequest] = []
        self.time_limits_s: list[float | None] = []  # what each streaming call had left when it came
        self.address = ""
        self.tls: PeerTLS | None = None
        self.control = NodeService(1.0, self.tell)
        self._changed = asyncio.Event()
        self._coordinators: tuple[str, ...] = ()
        self._server: grpc.aio.Server | None = None
        self._memberships: Memberships | None = None

    async def start(self, *coordinators: str, port: int = 0) -> None:
        self._server = make_server()
        self.register(self._server)
        self.control.register(self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', port, self.tls)}"
        await self._server.start()
        self._coordinators = coordinators
        await self._join()

    async def stop(self) -> None:
        """Leaves the cluster and ends every call: what others see when the process dies."""
        if self._memberships is not None:
            await self._memberships.close()
        if self._server is not None:
            await self._server.stop(None)

    async def fall_silent(self) -> None:
        """Reports nothing more; calls stay open."""
        assert self._memberships is not None
        await self._memberships.close()

    async def join_again(self) -> None:
        """Its stream to the coordinator breaks; its calls stay open."""
        await self.fall_silent()
        await self._join()

    async def _join(self) -> None:
        info = NodeInfo(self.role, self.instance_id, self.address, self.model)
        self._memberships = Memberships(
            self._coordinators, info, self.status, interval_s=0.1, cached=self.cached_blocks, tls=self.tls
        )
        await self._memberships.start()
        await self._memberships.wait_joined()

    async def kill(self) -> None:
        """Ends every call at once while the coordinator still believes in the node."""
        assert self._server is not None
        await self._server.stop(None)

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def blocks(self) -> BlockCounts:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        raise NotImplementedError

    def status(self) -> NodeStatus:
        return NodeStatus(
            ready=self.ready,
            draining=self.draining,
            blocks=self.blocks(),
            num_slots_free=self.num_slots_free,
            num_waiting_tokens=self.num_waiting_tokens,
            rates=self.rates,
            weight=self.control.weight,
        )

    def tell(self) -> None:
        """State changed: whoever waits for it looks, and the coordinator hears of it."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._memberships is not None:
            self._memberships.changed()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    async def until_reached(self, stage: str, times: int = 1) -> None:
        await self.until(lambda: self.reached[stage] >= times)

    async def _reach(self, stage: str) -> None:
        self.reached[stage] += 1
        self.tell()
        await self.at[stage].pass_through()


@dataclass(slots=True)
class Reservation:
    request: NodeRequest
    num_blocks: int
    attempt: int = 0
    committed: asyncio.Event = field(default_factory=asyncio.Event)
    decoding: bool = False


class FakeDecodeNode(FakeNode, decode_pb2_grpc.DecodeServicer):
    """`num_cached_blocks` are said to be here of every prompt. Stage "token" is passed before each token."""

    role = Role.DECODE_NODE
    stages = ("reserve", "granted", "decode", "token", "finish")

    def __init__(self, instance_id: str = "decode-1", num_blocks: int = 32) -> None:
        super().__init__(instance_id, num_blocks)
        self.num_cached_blocks = 0
        self.reservations: dict[ReservationId, Reservation] = {}
        self.max_reserved = 0  # most blocks ever reserved at once
        self.itl_targets_s: list[float] = []  # of each request that asked for room
        self._numbers = itertools.count(1)

    def register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    @property
    def num_reserved(self) -> int:
        return sum(reservation.num_blocks for reservation in self.reservations.values())

    @property
    def idle(self) -> bool:
        return not self.reservations

    def blocks(self) -> BlockCounts:
        reserved = self.num_reserved
        return BlockCounts(total=self.num_blocks, free=self.num_blocks - reserved, reserved=reserved)

    def commit(self, target: HandoffTarget) -> None:
        """What the KV stream of a prefill node would end in."""
        reservation = self.reservations.get(target.reservation_id)
        if reservation is None or target.instance_id != self.instance_id or target.attempt <= reservation.attempt:
            raise StaleError(f"decode node {self.address}: no handoff is expected here")
        if reservation.committed.is_set():
            raise AlreadyCommittedError(f"decode node {self.address}: the handoff is committed already")
        reservation.attempt = target.attempt
        reservation.committed.set()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveReply:
        node_request, num_tokens, num_tokens_now, itl_target_s = convert_decode.reserve_request_from_pb(request)
        self.itl_targets_s.append(itl_target_s)
        await self._reach("reserve")
        num_blocks = self.model.layout.blocks_for(num_tokens_now or num_tokens)
        if num_blocks > self.num_blocks - self.num_reserved:
            raise OverloadedError(f"{num_blocks} blocks are not to be had now")
        self.requests.append(node_request)
        reservation_id = ReservationId(f"{self.instance_id}/{next(self._numbers)}")
        self.reservations[reservation_id] = Reservation(node_request, num_blocks)
        self.max_reserved = max(self.max_reserved, self.num_reserved)
        # Granted, but the reply is not on its way: what a client's cancel in this moment leaves behind.
        await asyncio.shield(self._reach("granted"))
        num_cached = min(self.num_cached_blocks, (len(node_request.token_ids) - 1) // BLOCK_TOKENS)
        granted = ReservationGranted(reservation_id, self.instance_id, num_cached, lease_s=10.0)
        return convert_decode.reservation_granted_to_pb(granted)

    async def Release(self, request: decode_pb2.ReleaseRequest, context: Any) -> decode_pb2.ReleaseReply:
        self._drop(ReservationId(request.reservation_id))
        return decode_pb2.ReleaseReply()

    async def Renew(self, request: decode_pb2.RenewRequest, context: Any) -> decode_pb2.RenewReply:
        return decode_pb2.RenewReply(lease_s=10.0)

    async def Decode(
        self, requests: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeReply]:
        async with aclosing(answers(requests, self._decode)) as replies:
            async for reply in replies:
                yield reply

    async def _decode(self, wanted: AnswerWanted) -> AnswerEvents:
        reservation = self.reservations.get(wanted.reservation_id)
        if reservation is None:
            raise NotFoundError(f"there is no reservation {wanted.reservation_id}")
        reservation.decoding = True
        self.time_limits_s.append(wanted.timeout_s)
        try:
            await self._reach("decode")
            if not wanted.compute_tail:
                await reservation.committed.wait()
            async for event in self._answer(reservation.request, compute_tail=wanted.compute_tail):
                yield event
        finally:
            self._drop(wanted.reservation_id)

    async def _answer(
        self, request: NodeRequest, *, compute_tail: bool
    ) -> AsyncIterator[TokensDecoded | DecodeFinished]:
        output = request.token_ids[request.num_prompt_tokens :]
        if output != self.answer_ids[: len(output)]:
            raise InvalidRequestError(f"{output} is not how the answer begins")
        for number in range(len(output), len(self.answer_ids)):
            await self._reach("token")
            token_id = self.answer_ids[number]
            yield TokensDecoded((generated(request, number, self.answer_ids),))
            reason = finish_reason(request, token_id, number + 1)
            if reason is not None:
                await self._reach("finish")
                cached = CachedTokens(device=self.num_cached_blocks * BLOCK_TOKENS) if compute_tail else CachedTokens()
                yield DecodeFinished(reason, cached, compute_s=0.25 if compute_tail else 0.0)
                return

    def _drop(self, reservation_id: ReservationId) -> None:
        if self.reservations.pop(reservation_id, None) is not None:
            self.tell()


class FakePrefillNode(FakeNode, prefill_pb2_grpc.PrefillServicer):
    """Finds `cached` of every prompt. Stages: "start", before PrefillStarted; "compute"; "committed", before it tells
    the coordinator of a handoff that the decode node has committed."""

    role = Role.PREFILL_NODE
    stages = ("start", "compute", "committed")

    def __init__(
        self, decode_nodes: list[FakeDecodeNode], instance_id: str = "prefill-1", num_blocks: int = 64
    ) -> None:
        super().__init__(instance_id, num_blocks)
        self.cached = CachedTokens()
        self.targets: list[HandoffTarget | None] = []
        self.num_running = 0
        self._decode_nodes = decode_nodes

    def register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    @property
    def idle(self) -> bool:
        return self.num_running == 0

    def blocks(self) -> BlockCounts:
        return BlockCounts(total=self.num_blocks, free=self.num_blocks)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        node_request, target = convert_prefill.prefill_request_from_pb(request)
        self.requests.append(node_request)
        self.targets.append(target)
        self.time_limits_s.append(context.time_remaining())
        self.num_running += 1
        try:
            await self._reach("start")
            yield convert_prefill.prefill_event_to_pb(PrefillStarted(self.cached))
            await self._reach("compute")
            if target is not None:
                self._find(target.address).commit(target)
            await self._reach("committed")
            yield convert_prefill.prefill_event_to_pb(self._finished(node_request, target))
        finally:
            self.num_running -= 1
            self.tell()

    def _finished(self, request: NodeRequest, target: HandoffTarget | None) -> PrefillFinished:
        number = len(request.token_ids) - request.num_prompt_tokens
        return PrefillFinished(
            first_token=generated(request, number, self.answer_ids),
            cached=self.cached,
            compute_s=0.5,
            handoff_s=0.125 if target else 0.0,
            handoff_bytes=4096 if target else 0,
        )

    def _find(self, address: str) -> FakeDecodeNode:
        for node in self._decode_nodes:
            if node.address == address:
                return node
        raise StaleError(f"decode node {address} is not there")


def generated(request: NodeRequest, number: int, answer_ids: tuple[int, ...] = ANSWER_IDS) -> GeneratedToken:
    """The answer's token; asked for log-probabilities, its own is -1 for the first, -2 for the second and so on."""
    token_id = answer_ids[number]
    if request.sampling.logprobs is None:
        return GeneratedToken(token_id)
    chosen = TokenLogprob(token_id, -1.0 - number)
    return GeneratedToken(token_id, StepLogprobs(chosen, (chosen,) * request.sampling.logprobs))


def finish_reason(request: NodeRequest, token_id: int, num_output: int) -> FinishReason | None:
    params = request.sampling
    if token_id in params.stop_token_ids or (token_id == EOS_TOKEN_ID and not params.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output == params.max_tokens else None


def other_model(**changes: Any) -> ModelInfo:
    return replace(MODEL, **changes)
