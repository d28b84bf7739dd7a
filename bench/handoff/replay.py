"""Hands over KV that nobody computes: the product's HandoffSender over a pool that is full already.

How fast the blocks become final, and so may leave, is the caller's to say; see bench.handoff.pace.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import abc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import torch

from bench.handoff.pace import FULL, blocks_due
from bench.handoff.transfers import Meter
from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.kv.cache import DTYPES, PagedKVCache
from kvrelay.kv.hashing import Buffer, chain_root
from kvrelay.messages import HandoffTarget, NodeRequest, ReservationGranted
from kvrelay.rpc import raw
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockId, RequestId
from prefill_node.engine import Admitted, Computed
from prefill_node.progress import Progress
from prefill_node.scheduler import JobId
from prefill_node.sender import HandoffReport, HandoffSender
from prefill_node.turns import Turns

STALL_S = 30.0
RESERVE_TIMEOUT_S = 30.0
PACE_S = 0.004  # between two looks at what is due; a block of the demo model's takes 1.2 ms at 300 MB/s
JOB = JobId(1)
FIRST_TOKEN = GeneratedToken(3)
NUM_SPARE_TOKENS = 8  # of each reservation, for an answer that never comes


class Replay:
    """One pool of plausible numbers, handed over again and again, each time for a prompt not seen before."""

    def __init__(self, channel: grpc.aio.Channel, address: str, info: ModelInfo, num_blocks: int) -> None:
        self._channel = channel
        self._turns = Turns(info.layout.slab_bytes)  # the channel's
        self._client = DecodeClient(channel)
        self._address = address
        self._info = info
        self._num_blocks = num_blocks
        self._cache = PagedKVCache(info.layout, num_blocks)
        # A node that decodes meanwhile must meet no NaN in a block that it is given later.
        self._cache.tensor[:] = torch.randn(info.layout.slab_shape).mul(0.1).to(DTYPES[info.dtype])
        self.num_bytes = 0  # that have left, of all handoffs
        self.left = asyncio.Event()  # set when some do
        self._draw = random.Random(time.time_ns())
        self._ids = itertools.count(1)

    async def hand_over(self, bytes_per_s: float = FULL, meter: Meter | None = None) -> HandoffReport:
        """One handoff of all blocks: reserved, sent, committed, released. `meter` sees the sending alone."""
        async with self._reserved() as (sequence, target):
            progress = Progress()
            progress.take(Admitted(JOB, tuple(map(BlockId, range(self._num_blocks))), 0), time.monotonic())
            call = raw.stream_stream(self._channel, raw.KV_TRANSFER, "Receive")()
            sender = HandoffSender(
                call, self._turns, target, self._info, sequence, progress, self._read, stall_s=STALL_S
            )
            if meter is not None:
                meter.start()
            computing = asyncio.create_task(self._compute(progress, sequence.num_tokens, bytes_per_s))
            try:
                report = await sender.send()
            finally:
                computing.cancel()
            if meter is not None:
                meter.stop(report.num_bytes)
        return report

    def _read(self, block_ids: abc.Sequence[BlockId], start: int, end: int) -> list[Buffer]:
        self.num_bytes += (end - start) * len(block_ids)
        self.left.set()
        return self._cache.view_slabs(block_ids, start, end)

    @asynccontextmanager
    async def _reserved(self) -> AsyncIterator[tuple[Sequence, HandoffTarget]]:
        request = self._request()
        num_tokens = len(request.token_ids)
        granted = await self._client.reserve(request, num_tokens + NUM_SPARE_TOKENS, RESERVE_TIMEOUT_S)
        try:
            yield self._sequence(request), self._target(granted)
        finally:
            await self._client.release(granted.reservation_id)

    def _request(self) -> NodeRequest:
        num_tokens = self._num_blocks * self._info.layout.block_tokens
        token_ids = tuple(self._draw.choices(range(3, self._info.vocab_size), k=num_tokens))
        sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_SPARE_TOKENS, ignore_eos=True)
        return NodeRequest(RequestId(f"replay-{next(self._ids)}"), token_ids, num_tokens, sampling)

    def _sequence(self, request: NodeRequest) -> Sequence:
        layout = self._info.layout
        root = chain_root(self._info.fingerprint, layout.fingerprint, request.tenant_salt)
        return Sequence.create(request, root, layout.block_tokens)

    def _target(self, granted: ReservationGranted) -> HandoffTarget:
        if granted.num_cached_blocks:
            raise AssertionError("a prompt drawn at random is not cached")
        return HandoffTarget(self._address, granted.instance_id, granted.reservation_id, 1, 0)

    async def _compute(self, progress: Progress, num_tokens: int, bytes_per_s: float) -> None:
        """Lets the blocks become final one after another, as an engine's steps would."""
        layout, started, num_final = self._info.layout, time.monotonic(), -1
        while num_final < self._num_blocks:
            now = time.monotonic()
            due = blocks_due(bytes_per_s, now - started, layout.slab_bytes, self._num_blocks)
            if due > num_final:
                num_final = due
                done = min(due * layout.block_tokens, num_tokens)
                token = FIRST_TOKEN if due == self._num_blocks else None
                progress.take(Computed(JOB, done, token), now)
            await asyncio.sleep(PACE_S)
