"""The replay counts what it says, and its policies are what their names say."""

from __future__ import annotations

import itertools
import re

import pytest

from bench.store.chart import BOTTOM, HEIGHT, TOP, Line, line_chart
from bench.store.foresight import ForesightCache
from bench.store.mooncake import TRACES, num_distinct, read_trace
from bench.store.policies import NOWHERE, POLICIES, Cache
from bench.store.replay import MeasuredStore, StoreIndex, replay

CONVERSATIONS = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3, 7], [5, 6, 8], [9], [1, 2, 4]]


def caches(capacity: int) -> dict[str, Cache]:
    return {name: make(capacity) for name, make in POLICIES.items()} | {"ours": StoreIndex(capacity)}


@pytest.mark.parametrize("name", ["ours", *POLICIES])
def test_with_room_for_all_every_policy_hits_whatever_was_seen(name: str) -> None:
    assert replay(CONVERSATIONS, caches(100)[name]) == pytest.approx(10 / 19)


@pytest.mark.parametrize("name", ["ours", *POLICIES])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_no_policy_holds_more_than_its_capacity_or_a_block_without_its_parent(name: str, capacity: int) -> None:
    cache = caches(capacity)[name]
    parents = {block: parent for blocks in CONVERSATIONS for block, parent in zip(blocks, [NOWHERE, *blocks])}  # noqa: B905
    for number in range(len(CONVERSATIONS)):
        replay(CONVERSATIONS[number : number + 1], cache)
        held = {block for block in parents if block in cache}
        assert 1 <= len(held) <= capacity
        assert all(parents[block] in (*held, NOWHERE) for block in held)


def held_of(cache: Cache, requests: list[list[int]]) -> set[int]:
    replay(requests, cache)
    return {block for blocks in requests for block in blocks if block in cache}


def test_each_policy_keeps_what_it_stands_for() -> None:
    requests = [[1], [2], [3], [1], [1], [2], [4]]
    assert held_of(caches(3)["FIFO"], requests) == {2, 3, 4}
    assert held_of(caches(3)["LRU"], requests) == {1, 2, 4}
    assert held_of(caches(3)["LFU"], [*requests, [5]]) == {1, 2, 5}
    assert held_of(caches(3)["ARC"], [[1], [1], [2], [3], [4], [5]]) == {1, 4, 5}
    assert held_of(caches(3)["S3-FIFO"], [[1], [1], [1], *[[n] for n in range(2, 9)]]) >= {1, 8}


def test_foresight_is_no_worse_than_any_policy() -> None:
    for capacity in (1, 2, 3, 5):
        seer = ForesightCache(capacity, CONVERSATIONS)
        best = replay(CONVERSATIONS, seer, seer.begin)
        assert all(replay(CONVERSATIONS, cache) <= best for cache in caches(capacity).values())


def test_a_store_without_threshold_stores_as_the_plain_one() -> None:
    measured = MeasuredStore(4, 0.0)
    assert replay(CONVERSATIONS, measured) == replay(CONVERSATIONS, StoreIndex(4))
    assert measured.num_stored > 0


def test_the_traces_are_there_and_their_blocks_always_follow_the_same_ones() -> None:
    distinct = []
    for trace in TRACES:
        requests = read_trace(trace)
        parents: dict[int, int] = {}
        for blocks in requests:
            for block, parent in zip(blocks, [NOWHERE, *blocks], strict=False):
                assert parents.setdefault(block, parent) == parent
        distinct.append((len(requests), num_distinct(requests)))
    assert distinct == [(12_031, 170_899), (3993, 40_148)]


def test_our_hit_rate_on_a_whole_trace_is_above_that_of_lru() -> None:
    requests = read_trace("synthetic")
    ours, lru = replay(requests, StoreIndex(10_000)), replay(requests, POLICIES["LRU"](10_000))
    assert 1.03 * lru < ours


def test_a_chart_names_every_line_and_its_axes() -> None:
    svg = line_chart("A <title>", [Line("a", [(10, 1), (100, 4)]), Line("b", [(10, 2), (100, 4)])],
                     emphasis="a", ceiling=("most", 9))  # fmt: skip
    assert svg.startswith("<svg ")
    for text in ("A &lt;title&gt;", ">a</text>", ">b</text>", ">most</text>", ">10</text>", ">100</text>"):
        assert text in svg
    assert svg.count("<polyline") == 2


def test_names_of_lines_that_end_together_are_apart_and_within_the_chart() -> None:
    for y in (0, 9):
        lines = [Line(f"line{number}", [(10, 1), (100, y)]) for number in range(8)]
        svg = line_chart("", lines, emphasis="line0", ceiling=("most", 9))
        ys = sorted(float(found) for found in re.findall(r'y="([0-9.-]+)" fill="#[0-9a-f]{6}"[^>]*>line', svg))
        assert len(ys) == 8
        assert all(after - before >= 13.9 for before, after in itertools.pairwise(ys))
        assert ys[0] > TOP
        assert ys[-1] <= HEIGHT - BOTTOM + 4
