"""A prompt's way to its first token beside any store, on a clock of the test's own, by the very code that decides.

The engine computes a block in 10 ms, 32 blocks a step. A store is the times at which its blocks arrive; what never
arrives is at infinity.
"""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.load_or_compute import SHORT_HEAD_START_S, LoadOrCompute
from kvrelay.kv.meeting import Meeting

BLOCK_S = 0.010
STEP_BLOCKS = 32


def measured(first_s: float | None = None, block_s: float = 0.0) -> LoadOrCompute:
    costs = LoadOrCompute(16)
    costs.computed(512, STEP_BLOCKS * BLOCK_S)
    if first_s is not None:
        costs.loaded(101, first_s, first_s + 100 * block_s)
    return costs


class Prompt:
    """One of `num_blocks` that the store is said to have."""

    def __init__(self, costs: LoadOrCompute, num_blocks: int, arrivals: list[float]) -> None:
        self.meeting = Meeting(0, num_blocks)
        self.now = 0.0
        self._plan = costs.choose(num_blocks)
        self._left = arrivals if self._plan.loads else []

    def first_token_s(self) -> float:
        self._wait_head_start()
        position = 0
        while position < self.meeting.end:
            if self.meeting.num_loaded and self.meeting.loaded_from == position:
                break
            end = min(self.meeting.compute(position + STEP_BLOCKS), self.meeting.end)
            self._pass((end - position) * BLOCK_S)
            position = end
        return self.now

    def _wait_head_start(self) -> None:
        """As `prefill_node.loading` does."""
        for _ in range(2):
            self._wait_at_most(self._plan.head_start_s)
            if self.meeting.num_loaded * 2 <= self.meeting.end:
                return

    def _wait_at_most(self, limit_s: float) -> None:
        """Until the last block has come, for as long at most."""
        if self._left:
            self._pass(min(limit_s, self._left[-1] - self.now))

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        while self._left and self._left[0] <= self.now + 1e-9:
            self._left.pop(0)
            self.meeting.load(lambda index: None)


gaps = st.one_of(st.floats(0.0, 0.002), st.floats(0.0, 1.0), st.just(math.inf))


@given(
    num_blocks=st.integers(1, 300),
    gap_s=st.lists(gaps, min_size=300, max_size=300),
    known=st.none() | st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 0.1)),
)
def test_no_store_makes_a_first_token_later_than_1_2_times(
    num_blocks: int, gap_s: list[float], known: tuple[float, float] | None
) -> None:
    """Whatever it did before and whatever it does now, 20 ms apart for the shortest prompts."""
    arrivals = list(accumulate(gap_s))[:num_blocks]
    computed_s = num_blocks * BLOCK_S
    took_s = Prompt(measured(*known) if known else measured(), num_blocks, arrivals).first_token_s()
    assert took_s <= max(1.2 * computed_s, computed_s + SHORT_HEAD_START_S) + 1e-6


def rate(num_blocks: int, first_s: float, block_s: float) -> list[float]:
    return [first_s + index * block_s for index in range(num_blocks)]


def test_a_fast_store_is_as_fast_as_its_load() -> None:
    prompt = Prompt(measured(0.003, 0.0005), 125, rate(125, 0.003, 0.0005))
    assert math.isclose(prompt.first_token_s(), 0.003 + 124 * 0.0005)
    assert prompt.meeting.num_loaded == 125


def test_a_store_as_fast_as_the_engine_halves_the_time() -> None:
    prompt = Prompt(measured(0.01, 0.01), 128, rate(128, 0.01, 0.01))
    assert 0.60 <= prompt.first_token_s() <= 0.72
    assert 56 <= prompt.meeting.num_loaded <= 70


def test_a_store_that_stops_half_way_leaves_the_half_it_gave() -> None:
    prompt = Prompt(measured(0.003, 0.0005), 100, [*rate(50, 0.003, 0.0005), *[math.inf] * 50])
    assert prompt.first_token_s() <= 0.15 + 0.5 + 1e-6
    assert prompt.meeting.num_loaded == 50
