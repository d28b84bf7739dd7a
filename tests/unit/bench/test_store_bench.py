"""The parts of bench-store that decide or prove something."""

from __future__ import annotations

import asyncio
import math
import mmap
from pathlib import Path

import grpc
import pytest

from bench.store import page_cache, requests, ttft
from bench.store.plan import Effort
from bench.store.policy_alone import PolicyAlone
from bench.store.put import ROOT, Putter
from bench.store.ttft import break_even
from kvrelay.kv import frame
from kvrelay.kv.frame import FrameKind
from kvrelay.kv.layout import KVLayout
from kvrelay.pb import kvstore_pb2
from kvrelay.types import BlockHash

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=16)
COMPUTED = {16: 1.0, 64: 2.0, 256: 3.0}


@pytest.mark.parametrize(
    ("times", "shortest"),
    [
        ({16: 0.5, 64: 0.5, 256: 0.5}, 16),
        ({16: 1.0, 64: 2.0, 256: 3.0}, 16),
        ({16: 1.5, 64: 0.5, 256: 0.5}, 64),
        ({16: 0.5, 64: 2.5, 256: 0.5}, 256),
        ({16: 0.5, 64: 0.5, 256: 3.5}, math.inf),
    ],
)
def test_break_even_is_the_shortest_prefix_behind_the_last_that_is_slower(
    times: dict[int, float], shortest: float
) -> None:
    assert break_even(times, COMPUTED) == shortest


def test_a_file_out_of_the_page_cache_is_seen_to_be_and_comes_back_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    assert page_cache.resident_share(path) == 1.0
    page_cache.drop(path)
    assert page_cache.resident_share(path) <= page_cache.COLD_SHARE
    path.read_bytes()
    assert page_cache.resident_share(path) == 1.0


def test_pages_that_somebody_has_mapped_are_not_taken_for_cold(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = bytes(len(memory))
        with pytest.raises(RuntimeError, match="stayed in the page cache"):
            page_cache.drop(path)


def test_a_put_says_of_each_block_what_it_follows_and_where_it_is() -> None:
    hashes = [BlockHash(bytes([number]) * 32) for number in range(1, 4)]

    async def frames_of(start: int) -> list[frame.Frame]:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            putter = Putter(channel, LAYOUT, "m" * 64)
            return list(putter.frames(hashes, [bytes(LAYOUT.slab_bytes)] * (3 - start), start))

    whole, rest = asyncio.run(frames_of(0)), asyncio.run(frames_of(1))
    assert [found.kind for found in whole] == [FrameKind.BEGIN, *[FrameKind.BLOCK] * 3, FrameKind.END]
    assert [found.block_index for found in rest[1:-1]] == [0, 1]
    begins = [kvstore_pb2.PutBegin.FromString(bytes(frames[0].payload)) for frames in (whole, rest)]
    assert [list(begin.parent_hashes) for begin in begins] == [[ROOT, *hashes[:2]], hashes[:2]]
    assert [list(begin.chain_indexes) for begin in begins] == [[0, 1, 2], [1, 2]]


def test_every_bar_names_figures_that_its_row_gives() -> None:
    effort = Effort()
    assert effort.prefix_tokens not in effort.short_prefixes
    assert {bar.figure[1] for bar in ttft.bars(effort)} == {ttft.MEMORY, ttft.WARM, ttft.COLD}
    assert {bar.figure[1] for bar in requests.bars()} == {*requests.FAULT_LINES, requests.WITH_STORE}


def test_the_policy_alone_finds_what_was_asked_for_lately_as_far_as_it_fits() -> None:
    record_bytes = 4_096 * 3  # of 8,192 bytes and a header
    alone = PolicyAlone(6 * record_bytes, 8_192)
    chains = [[BlockHash(bytes([number, place]) * 16) for place in range(4)] for number in range(1, 4)]
    assert [alone.ask(chains[0]), alone.ask(chains[0])] == [0, 4]
    assert alone.ask(chains[1]) == 0
    assert 2 <= alone.ask(chains[1]) <= 4
    assert alone.ask(chains[2]) == 0
