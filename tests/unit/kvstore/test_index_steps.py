"""Eviction takes O(1) steps a block. Counted in lines of the store's code that run, so no machine's pace matters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore.index
from kvstore.block import BlockInfo
from kvstore.index import TierIndex
from kvstore.quotas import Quotas

MAX_LINES_A_BLOCK = 300  # making room for one and adding it; 150 to 240 when this was written
CHURN = 200
PACKAGE = Path(kvstore.index.__file__).parent


def lines_run(call: Callable[[], None]) -> int:
    num_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if Path(frame.f_code.co_filename).parent != PACKAGE:
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


class Filler:
    """Puts block after block, in chains of `chain_length`, for `num_tenants` in turn."""

    def __init__(self, num_blocks: int, chain_length: int, num_tenants: int = 1) -> None:
        self.index = TierIndex(num_blocks, Quotas())
        self.num_put = 0
        self._chain_length = chain_length
        self._num_tenants = num_tenants

    def put(self, num_blocks: int) -> None:
        for number in range(self.num_put, self.num_put + num_blocks):
            depth = number % self._chain_length
            tenant = f"t{number // self._chain_length % self._num_tenants}"
            parent = f"{number - 1}" if depth else f"root{number}"
            info = BlockInfo(f"{number}".encode(), parent.encode(), depth, tenant, 60.0)
            assert self.index.make_room(1, tenant, 1.0, keep=[info.parent]) is not None
            self.index.add(info, 1, 1.0)
        self.num_put += num_blocks


@pytest.mark.parametrize("chain_length", [1, 50, 100_000])
@pytest.mark.parametrize("num_tenants", [1, 100])
def test_a_larger_tier_or_a_longer_chain_takes_no_more_steps(chain_length: int, num_tenants: int) -> None:
    counts = []
    for num_blocks in (500, 4000):
        filler = Filler(num_blocks, chain_length, num_tenants)
        filler.put(num_blocks if chain_length <= num_blocks else num_blocks // 2)
        if chain_length > num_blocks:  # one chain; a second one takes its place from its tail
            filler.num_put = chain_length
            filler.put(num_blocks // 2)
        evicted_before = filler.index.num_evictions
        counts.append(lines_run(lambda churning=filler: churning.put(CHURN)) / CHURN)  # type: ignore[misc]
        assert filler.index.num_evictions - evicted_before == CHURN
    small, large = counts
    assert large <= MAX_LINES_A_BLOCK
    assert large <= 1.1 * small


def test_dropping_one_long_chain_at_once_costs_as_much_a_block() -> None:
    counts = []
    for num_blocks in (500, 4000):
        filler = Filler(num_blocks, chain_length=num_blocks)
        filler.put(num_blocks)
        counts.append(lines_run(lambda: filler.index.make_room(num_blocks, "t0", 1.0)) / num_blocks)  # noqa: B023
        assert len(filler.index) == 0
    assert counts[1] <= 1.1 * counts[0]


def test_being_refused_costs_no_more_than_what_was_asked_for() -> None:
    filler = Filler(4000, chain_length=100)
    filler.put(4000)
    filler.index.pin(list(filler.index), 100.0)
    assert lines_run(lambda: filler.index.make_room(1, "t0", 1.0)) <= MAX_LINES_A_BLOCK
