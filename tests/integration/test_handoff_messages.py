"""Sender and receiver of the product on slabs of real sizes: they arrive as they were, in bounded messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.cluster import ModelInfo
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import KVRelayError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import HandoffTarget
from kvrelay.rpc import raw
from kvrelay.rpc.channel import open_channel
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId
from prefill_node.engine import Admitted, Computed
from prefill_node.progress import Progress
from prefill_node.scheduler import JobId
from prefill_node.sender import HandoffReport, HandoffSender
from tests.support.decode_harness import Harness, decode_node
from tests.support.fake_engine import make_info, make_request
from tests.support.known_link import known_link

NUM_BLOCKS = 7
MIB = 2**20
JOB = JobId(1)


def layout_of(slab_bytes: int) -> KVLayout:
    return KVLayout(num_layers=slab_bytes // 4_096, num_kv_heads=1, head_dim=32, dtype="float32", block_tokens=16)


def filled(layout: KVLayout) -> PagedKVCache:
    """Every number of it is another one."""
    cache = PagedKVCache(layout, NUM_BLOCKS)
    numbers = cache.tensor.view(-1)
    numbers.copy_(numbers.new_ones(numbers.shape).cumsum(0))
    return cache


async def hand_over(
    harness: Harness, channel: grpc.aio.Channel, source: PagedKVCache, num_tokens: int
) -> HandoffReport:
    info: ModelInfo = harness.node.info
    request = make_request(tuple(i % 90 for i in range(num_tokens)), max_tokens=1)
    granted = await harness.client.reserve(request, num_tokens + 1, 10.0)
    target = HandoffTarget(harness.address, granted.instance_id, granted.reservation_id, 1, 0)
    sequence = Sequence.create(request, chain_root(info.fingerprint, info.layout.fingerprint, b""), 16)
    progress = Progress()
    progress.take(Admitted(JOB, tuple(BlockId(i) for i in range(NUM_BLOCKS)), 0), time.monotonic())
    progress.take(Computed(JOB, num_tokens, GeneratedToken(20)), time.monotonic())
    call = raw.stream_stream(channel, raw.KV_TRANSFER, "Receive")()
    sender = HandoffSender(
        call, known_link(info.layout.slab_bytes), target, info, sequence, progress, source.view_slabs, stall_s=10.0
    )
    try:
        report = await sender.send()
        received = harness.pool.match(sequence.block_hashes)
        slabs = [harness.cache.read_slab(block_id) for block_id in received]
        assert slabs == [source.read_slab(BlockId(i)) for i in range(num_tokens // 16)]
        return report
    finally:
        await harness.client.release(granted.reservation_id)


def info_of(slab_bytes: int) -> ModelInfo:
    return make_info(layout_of(slab_bytes), max_model_len=200)


@pytest.mark.parametrize("slab_bytes", [16_384, 360 * 1024, MIB // 2, MIB, 2 * MIB, 5 * MIB])
@pytest.mark.parametrize("num_tokens", [NUM_BLOCKS * 16, NUM_BLOCKS * 16 - 5])
async def test_no_message_is_longer_than_docs_wire_says(slab_bytes: int, num_tokens: int) -> None:
    """Both ends refuse what is longer, also with slabs that are: those of models of 8 and of 70 billion parameters."""
    limit = 1_114_112
    info = info_of(slab_bytes)
    source, target = filled(info.layout), PagedKVCache(info.layout, NUM_BLOCKS + 1)
    async with (
        decode_node(info=info, cache=target, num_blocks=NUM_BLOCKS + 1, max_message_bytes=limit) as harness,
        open_channel(harness.address, max_message_bytes=limit, own_connection=True) as channel,
    ):
        report = await hand_over(harness, channel, source, num_tokens)
    assert report.num_bytes == NUM_BLOCKS * slab_bytes
    assert report.tail_s > 0.0


async def test_a_limit_below_a_message_ends_the_handoff() -> None:
    info = info_of(2 * MIB)
    source, target = filled(info.layout), PagedKVCache(info.layout, NUM_BLOCKS + 1)
    async with (
        decode_node(info=info, cache=target, num_blocks=NUM_BLOCKS + 1, max_message_bytes=MIB + 75) as harness,
        open_channel(harness.address, own_connection=True) as channel,
    ):
        with pytest.raises(KVRelayError, match="decode node 127"):
            await hand_over(harness, channel, source, NUM_BLOCKS * 16)


@pytest.fixture
async def plain() -> AsyncIterator[tuple[Harness, grpc.aio.Channel]]:
    """A node with its own limits, and a peer with those that gRPC has by itself: 4 MiB."""
    info = info_of(5 * MIB)
    async with (
        decode_node(info=info, cache=PagedKVCache(info.layout, NUM_BLOCKS + 1), num_blocks=NUM_BLOCKS + 1) as harness,
        grpc.aio.insecure_channel(harness.address) as channel,
    ):
        yield harness, channel


async def test_grpcs_own_limits_do_for_slabs_of_5_mib(plain: tuple[Harness, grpc.aio.Channel]) -> None:
    harness, channel = plain
    source = filled(harness.node.info.layout)
    report = await hand_over(harness, channel, source, NUM_BLOCKS * 16)
    assert report.num_bytes == NUM_BLOCKS * 5 * MIB
