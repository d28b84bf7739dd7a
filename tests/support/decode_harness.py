"""A decode node behind a real gRPC server, and a sender that can misbehave on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from decode_node.engine import Cache, DecodeCore, Runner
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from decode_node.resume import ResumeCosts
from decode_node.scheduler import Scheduler
from decode_node.service import DecodeService
from kvrelay.cluster import ModelInfo
from kvrelay.engine.loop import EngineLoop
from kvrelay.engine.sequence import Sequence
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import ChainBlock
from kvrelay.kv.frame import Frame, FrameKind, block_frame, control_frame, encode, tail_frame
from kvrelay.kv.hashing import ChecksumChain, chain_root
from kvrelay.kv.pool import BlockPool
from kvrelay.limits import DecodeLimits
from kvrelay.messages import BlocksReceived, HandoffBegin, HandoffEnd, NodeRequest, ReservationGranted
from kvrelay.rpc import convert_decode
from kvrelay.rpc.channel import MAX_MESSAGE_BYTES, error_from_rpc, open_channel
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.rpc.raw import KV_TRANSFER, stream_stream
from kvrelay.rpc.server import bind, make_server
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockCounts, BlockHash, InstanceId
from tests.support.fake_engine import FakeCache, FakeRunner, make_info, slab_of
from tests.support.manual_clock import ManualClock

INSTANCE = InstanceId("decode-instance")


@dataclass
class Harness:
    """The node's insides and a client's view of it."""

    node: DecodeNode
    pool: BlockPool
    cache: Cache
    runner: Runner
    registry: CollectorRegistry
    address: str
    channel: grpc.aio.Channel
    clock: ManualClock | None
    offered: list[BlockHash]  # for the kvstore
    engine_dies: bool = False  # set by a test that kills it
    client: DecodeClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = DecodeClient(self.channel)

    async def counts(self) -> BlockCounts:
        """The pool's, proven, after all commands given so far."""

        def check(core: DecodeCore) -> BlockCounts:
            self.pool.check()
            return self.pool.counts()

        return await self.node.engine.call(check)

    async def all_free(self) -> BlockCounts:
        """Waits until nothing is reserved or held: the event loop learns of cancelled calls a little later."""
        async with asyncio.timeout(60.0):
            while True:
                counts = await self.counts()
                if counts.reserved == counts.held == 0 and not len(self.node.reservations):
                    return counts

    def open_handoff(self) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        return stream_stream(self.channel, KV_TRANSFER, "Receive")()


@asynccontextmanager
async def decode_node(
    *,
    info: ModelInfo | None = None,
    runner: Runner | None = None,
    cache: Cache | None = None,
    num_blocks: int = 32,
    max_batch: int = 4,
    max_batched_tokens: int = 8,
    max_requests: int = 8,
    reserve_output_tokens: int = 0,
    lease_s: float = 10.0,
    costs: ResumeCosts | None = None,
    store: BlockStore | None = None,
    clock: ManualClock | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncIterator[Harness]:
    """Serves until left; proves on the way out that nothing is held."""
    info, runner, cache = info or make_info(), runner or FakeRunner(), cache or FakeCache()
    pool, registry = BlockPool(num_blocks), CollectorRegistry()
    limits = DecodeLimits(max_batch, max_batched_tokens, max_requests, reserve_output_tokens)
    core = DecodeCore(info=info, runner=runner, cache=cache, pool=pool, scheduler=Scheduler(limits), costs=costs)
    timing: dict[str, Callable[[], float]] = {"clock": clock} if clock else {}
    engine: EngineLoop[DecodeCore] = EngineLoop(lambda: core, lambda output: node.deliver(output), **timing)
    offered: list[BlockHash] = []

    def offer(blocks: Seq[ChainBlock], *, urgent: bool = False) -> None:
        offered.extend(block.block_hash for block in blocks)

    node = DecodeNode(
        engine=engine,
        info=info,
        cache=cache,
        instance_id=INSTANCE,
        metrics=DecodeMetrics(registry),
        limits=limits,
        lease_s=lease_s,
        load=lambda: core.load,
        offer=offer,
        store=store,
        **timing,
    )
    await engine.start()
    await node.start()
    service, server = DecodeService(), make_server(max_message_bytes=max_message_bytes)
    service.node = node
    service.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    channel = open_channel(address, own_connection=True)
    harness = Harness(node, pool, cache, runner, registry, address, channel, clock, offered)
    try:
        yield harness
        if not harness.engine_dies:
            await harness.all_free()
    finally:
        await channel.close()
        await node.close()
        await server.stop(0)
        await engine.stop()


@dataclass
class Handoff:
    """What a prefill node would send for a request, with fields to spoil."""

    info: ModelInfo
    request: NodeRequest
    granted: ReservationGranted
    attempt: int = 0
    first_token: GeneratedToken = field(default_factory=lambda: GeneratedToken(20))
    slab: Callable[[int], bytes] = slab_of

    def sequence(self) -> Sequence:
        root = chain_root(self.info.fingerprint, self.info.layout.fingerprint, self.request.tenant_salt)
        return Sequence.create(self.request, root, self.info.layout.block_tokens)

    def begin(self) -> HandoffBegin:
        first_block = self.granted.num_cached_blocks
        return HandoffBegin(
            reservation_id=self.granted.reservation_id,
            instance_id=self.granted.instance_id,
            attempt=self.attempt,
            model_fingerprint=self.info.fingerprint,
            layout_fingerprint=self.info.layout.fingerprint,
            first_block=first_block,
            num_blocks=self.info.layout.blocks_for(len(self.request.token_ids)) - first_block,
        )

    def blocks(self) -> list[Frame]:
        sequence = self.sequence()
        num_full, num_tail_tokens = divmod(sequence.num_tokens, sequence.block_tokens)
        first = self.granted.num_cached_blocks
        full = [block_frame(i, sequence.block_hashes[i], self.slab(i)) for i in range(first, num_full)]
        tail = [tail_frame(num_full, num_tail_tokens, self.slab(num_full))] if num_tail_tokens else []
        return full + tail

    def end(self) -> HandoffEnd:
        chain = ChecksumChain()
        for frame in self.blocks():
            chain.add(frame.checksum)
        return HandoffEnd(len(self.blocks()), chain.digest(), self.first_token)

    def messages(self) -> list[bytes]:
        """BEGIN, blocks, END."""
        return [begin_message(self.begin()), *(encode(frame) for frame in self.blocks()), end_message(self.end())]


def begin_message(begin: HandoffBegin) -> bytes:
    return encode(control_frame(FrameKind.BEGIN, convert_decode.handoff_begin_to_bytes(begin)))


def end_message(end: HandoffEnd) -> bytes:
    return encode(control_frame(FrameKind.END, convert_decode.handoff_end_to_bytes(end)))


async def send(call: grpc.aio.StreamStreamCall[bytes, bytes], message: bytes) -> BlocksReceived:
    """Sends one frame and waits for its answer; raises the server's KVRelayError."""
    try:
        await call.write(message)
        return await answer(call)
    except asyncio.InvalidStateError:
        return await answer(call)  # the call is over; reading says why


async def answer(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> BlocksReceived:
    try:
        reply = await call.read()
        if reply is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await call.code()}")
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    return convert_decode.blocks_received_from_bytes(reply)  # type: ignore[arg-type]


async def hand_over(harness: Harness, messages: list[bytes]) -> list[BlocksReceived]:
    """Sends frames one by one, then ends the stream; gives the answers or raises the server's KVRelayError."""
    call = harness.open_handoff()
    try:
        received = [await send(call, message) for message in messages]
        await call.done_writing()
        if not received[-1].committed:
            received.append(await answer(call))
        return received
    finally:
        call.cancel()
