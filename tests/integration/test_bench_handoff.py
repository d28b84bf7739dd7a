"""What `make bench-handoff` measures is the product: its replayed KV arrives, and shared pools are shared."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
import torch

from bench.engine.launch import started
from bench.handoff.pace import FULL
from bench.handoff.plan import command
from bench.handoff.receiving import NodeSetting, decode_node, serving
from bench.handoff.replay import Replay
from bench.handoff.shapes import LAYOUTS, info_of
from bench.handoff.shared_memory import memory_in, pool_file
from bench.handoff.transfers import Meter
from kvrelay.kv.cache import PagedKVCache
from kvrelay.rpc.channel import open_channel
from kvrelay.types import BlockId

LAYOUT = LAYOUTS["135M"]
NUM_BLOCKS = 4
TIMEOUT_S = 60.0


@pytest.mark.parametrize("bytes_per_s", [FULL, 50e6])
async def test_replayed_kv_is_in_the_receivers_pool_and_its_bytes_are_counted(bytes_per_s: float) -> None:
    meter = Meter(os.getpid())
    async with (
        asyncio.timeout(TIMEOUT_S),
        decode_node(NodeSetting("135M", NUM_BLOCKS + 1)) as received,
        serving(received.node, None) as port,
        open_channel(f"127.0.0.1:{port}", own_connection=True) as channel,
    ):
        replay = Replay(channel, f"127.0.0.1:{port}", info_of("135M"), NUM_BLOCKS)
        for _ in range(2):
            await replay.hand_over(bytes_per_s, meter)
        written = [received.node.cache.read_slab(BlockId(block)) for block in range(NUM_BLOCKS + 1)]
    assert meter.num_bytes == replay.num_bytes == 2 * NUM_BLOCKS * 368_640
    values = torch.frombuffer(bytearray(written[0]), dtype=torch.bfloat16).float()
    assert 0.09 < values.std() < 0.11
    assert sum(slab == written[0] for slab in written) >= NUM_BLOCKS
    if bytes_per_s != FULL:
        assert meter.wall_s >= meter.num_bytes / bytes_per_s


def test_two_caches_in_one_file_have_the_same_blocks() -> None:
    size = LAYOUT.slab_bytes
    with pool_file(4 * size) as descriptor:
        whole = PagedKVCache(LAYOUT, 3, memory=memory_in(descriptor, 4 * size))
        behind = PagedKVCache(LAYOUT, 2, memory=memory_in(descriptor, 3 * size, offset=size))
    behind.write_slab(BlockId(0), b"\x3f" * LAYOUT.slab_bytes)
    assert whole.read_slab(BlockId(1)) == b"\x3f" * LAYOUT.slab_bytes
    assert not any(whole.read_slab(BlockId(0)))
    assert not any(PagedKVCache(LAYOUT, 1).read_slab(BlockId(0)))


def test_a_raw_socket_moves_what_it_is_asked_to() -> None:
    task: dict[str, object] = {"num_bytes": 3 * 2**20}
    with started("the receiver", command("raw_socket", task)) as receiver:
        task |= {"port": receiver.read()["port"], "peer_pid": receiver.pid}
        with started("the sender", command("raw_socket", task, niceness=1)) as sender:
            assert sender.read() == {"ready": True}
            report = sender.ask(seconds=0.01)
    assert set(report) == {"bytes_per_s", "sender_cpu_s", "receiver_cpu_s"}
    assert 1e6 < report["bytes_per_s"] < 1e11
    assert 0 < report["sender_cpu_s"] < 1e-6


def test_a_worker_keeps_to_its_cpus() -> None:
    program = "import json, os, sys; sys.stdin.readline(); print(json.dumps({'cpus': sorted(os.sched_getaffinity(0))}))"
    last = max(os.sched_getaffinity(0))
    with started("it", [sys.executable, "-c", program], cpus=(last,)) as worker:
        assert worker.ask(do="tell")["cpus"] == [last]
