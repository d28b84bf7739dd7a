"""A prefill node without a model: real engine thread, jobs, service and gRPC; fake runner, cache and store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.cluster import ModelInfo
from kvrelay.engine.batch import Batch, build
from kvrelay.engine.loop import EngineLoop
from kvrelay.errors import BadLogitsError
from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.load_or_compute import LoadOrCompute
from kvrelay.kv.pool import BlockPool
from kvrelay.limits import PrefillLimits
from kvrelay.messages import HandoffTarget, NodeRequest
from kvrelay.rpc import server as rpc_server
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import PrefillClient
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockCounts, BlockHash, BlockId, InstanceId, RequestId, ReservationId, Tier
from prefill_node.engine import PrefillCore, PrefillOutput
from prefill_node.jobs import KVAccess, PrefillJobs
from prefill_node.links import DecodeLinks
from prefill_node.metrics import PrefillMetrics
from prefill_node.scheduler import PrefillScheduler
from prefill_node.service import PrefillService
from tests.support.receivers import FakeReceiver

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=16)
MODEL = ModelInfo("tiny", "ab" * 32, "llama", 1_024, 300, (2,), LAYOUT, "float32", "fake")
GATE_TIMEOUT_S = 30.0


def make_request(num_tokens: int, first: int = 0) -> NodeRequest:
    token_ids = tuple((first + i) % 300 for i in range(num_tokens))
    return NodeRequest(RequestId("r"), token_ids, num_tokens, SamplingParams(temperature=0.0, seed=0, max_tokens=8))


class FakeCache:
    """Slabs as bytes; computing leaves b"c", the store writes what it has."""

    def __init__(self) -> None:
        self.slabs: dict[BlockId, bytes] = {}

    def read_slab(self, block_id: BlockId) -> bytes:
        return self.slabs.get(block_id, b"c" * LAYOUT.slab_bytes)

    def view_slabs(self, block_ids: Sequence[BlockId], start: int, end: int) -> list[bytes]:
        return [self.read_slab(block_id)[start:end] for block_id in block_ids]

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None:
        self.slabs[block_id] = bytes(payload)


class GatedRunner:
    """Draws the sequence's length. While `gate` is closed a step hangs on the engine thread; `entered` tells so."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.num_computed = self.num_steps = 0
        self.drawn: list[int] = []  # token ids, in order
        self.error: Exception | None = None
        self.bad_lengths: set[int] = set()  # of sequences that get bad logits
        self._close_after: int | None = None

    def close_gate_after(self, num_tokens: int) -> None:
        """The step after the one that computes the `num_tokens`th token hangs."""
        self._close_after = num_tokens

    def run(self, batch: Batch) -> Sequence[GeneratedToken | BadLogitsError | None]:
        build(batch, LAYOUT.block_tokens)
        self.loop.call_soon_threadsafe(self.entered.set)
        assert self.gate.wait(GATE_TIMEOUT_S)
        if self.error is not None:
            raise self.error
        self.num_computed += batch.num_tokens
        self.num_steps += 1
        if self._close_after is not None and self.num_computed >= self._close_after:
            self._close_after = None
            self.gate.clear()
        self.drawn.extend(row.sequence.num_tokens for row in batch.rows if row.yields_token)
        return [self._drawn(row.sequence.num_tokens) if row.yields_token else None for row in batch.rows]

    def _drawn(self, length: int) -> GeneratedToken | BadLogitsError:
        return BadLogitsError("NaN") if length in self.bad_lengths else GeneratedToken(length)


class FakeStore:
    """Holds the blocks in `tiers`; hangs before the first one while `gate` is closed."""

    def __init__(self) -> None:
        self.tiers: dict[BlockHash, Tier] = {}
        self.corrupt: set[BlockHash] = set()
        self.hangs: set[BlockHash] = set()
        self.hung = asyncio.Event()
        self.fails = False
        self.num_given = 0
        self.num_failures = self.num_corrupt = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    @property
    def is_blocked(self) -> bool:
        return False

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        self.entered.set()
        await self.gate.wait()
        if self.fails:
            self.num_failures += 1
            return []
        return [self.tiers[block_hash] for block_hash in takewhile(self.tiers.__contains__, hashes)]

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        raise NotImplementedError

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        raise NotImplementedError

    def stalled(self, chain: Chain | None = None) -> None:
        self.num_failures += 1

    async def close(self) -> None:
        return

    async def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        for block_hash in hashes:
            if block_hash in self.hangs:
                self.hung.set()
                await asyncio.Event().wait()
            if block_hash not in self.tiers or block_hash in self.corrupt:
                return
            self.num_given += 1
            yield block_hash, b"s" * LAYOUT.slab_bytes, self.tiers[block_hash]


class PrefillBench:
    """The node, a client of it, and the receiver its handoffs go to."""

    def __init__(self, num_blocks: int, budget: int, max_prefills: int, max_waiting: int) -> None:
        self.now = 1_000.0  # of the node's clock
        self.runner, self.cache, self.store, self.receiver = GatedRunner(), FakeCache(), FakeStore(), FakeReceiver()
        self.pool = BlockPool(num_blocks)
        self.offered: list[BlockHash] = []
        self.links = DecodeLinks(MODEL.layout.slab_bytes)
        self.engine = EngineLoop(
            lambda: self._make_core(budget, max_prefills, max_waiting), self._deliver, clock=lambda: self.now
        )
        self.registry = CollectorRegistry()
        metrics = PrefillMetrics(self.registry)
        self.jobs = PrefillJobs(
            self.engine,
            MODEL,
            KVAccess(self.cache.view_slabs, self.cache.write_slab),
            self.links,
            metrics,
            stall_s=GATE_TIMEOUT_S,
            store=self.store,
            costs=LoadOrCompute(LAYOUT.block_tokens, unmeasured_head_start_s=GATE_TIMEOUT_S),
            offer=self._offer,
            on_status=self._on_status,
            clock=lambda: self.now,
        )
        self.address = ""
        self.channel: grpc.aio.Channel
        self.client: PrefillClient
        self._changed = asyncio.Event()

    def target(self, first_block: int = 0, address: str = "") -> HandoffTarget:
        return HandoffTarget(
            address or self.address, InstanceId("decoder"), ReservationId("reservation"), 1, first_block
        )

    async def wait_for_status(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    async def settled(self) -> BlockCounts:
        """The pool once every job has ended and its blocks are given back; its books were checked."""
        await self.jobs.drain()
        await self.engine.call(lambda core: core.check_idle())
        counts = self.pool.counts()
        assert counts.held == counts.reserved == 0
        return counts

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PrefillBench]:
        await self.engine.start()
        server = rpc_server.make_server()
        service = PrefillService()
        service.jobs = self.jobs
        service.register(server)
        server.add_generic_rpc_handlers((self.receiver.handler(),))
        self.address = f"127.0.0.1:{rpc_server.bind(server, '127.0.0.1', 0)}"
        await server.start()
        self.channel = open_channel(self.address)
        self.client = PrefillClient(self.channel)
        try:
            yield self
            await self.settled()
        finally:
            self.runner.gate.set()
            await self.channel.close()
            await server.stop(None)
            await self.links.close()
            await self.engine.stop()

    def _make_core(self, budget: int, max_prefills: int, max_waiting: int) -> PrefillCore:
        scheduler = PrefillScheduler(
            PrefillLimits(
                max_batched_tokens=budget, chunk_tokens=budget, max_prefills=max_prefills, max_waiting=max_waiting
            )
        )
        return PrefillCore(self.runner, self.pool, scheduler, self.cache.read_slab, LAYOUT.block_tokens)

    def _deliver(self, output: object) -> None:
        assert isinstance(output, PrefillOutput)
        self.jobs.take(output)

    def _offer(self, blocks: Sequence[ChainBlock], *, urgent: bool = False) -> None:
        self.offered.extend(block.block_hash for block in blocks)

    def _on_status(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def prefill_bench(
    num_blocks: int = 32, budget: int = 64, max_prefills: int = 4, max_waiting: int = 4
) -> AsyncIterator[PrefillBench]:
    async with PrefillBench(num_blocks, budget, max_prefills, max_waiting).serving() as bench:
        yield bench
