"""Loading or computing, by what both have cost: 16 tokens a block, times in seconds."""

from __future__ import annotations

import pytest

from kvrelay.kv.load_or_compute import LoadOrCompute, LoadPlan

SKIP = LoadPlan(loads=False)
AT_ONCE = LoadPlan(loads=True)  # the engine begins at once, and they meet


def measured(*, tokens_per_s: float = 1_600.0, first_s: float | None = None, block_s: float = 0.0) -> LoadOrCompute:
    """With the defaults a block takes 10 ms to compute."""
    costs = LoadOrCompute(16)
    costs.computed(512, 512 / tokens_per_s)
    if first_s is not None:
        costs.loaded(101, first_s, first_s + 100 * block_s)
    return costs


def test_nothing_is_asked_for_where_there_is_nothing() -> None:
    assert measured().choose(0) == SKIP


def test_before_anything_is_measured_the_store_is_tried_for_a_moment() -> None:
    assert LoadOrCompute(16).choose(1) == LoadPlan(loads=True, head_start_s=0.2)


def test_a_store_that_was_not_measured_gets_a_share_of_the_time_that_computing_takes() -> None:
    plan = measured().choose(100)
    assert plan.loads
    assert plan.head_start_s == pytest.approx(0.15)


def test_a_fast_store_is_waited_for_and_no_longer_than_its_share() -> None:
    plan = measured(first_s=0.003, block_s=0.0005).choose(100)
    assert plan.loads
    assert plan.head_start_s == pytest.approx(0.15)


def test_tokens_that_wait_before_it_are_time_the_store_has_too() -> None:
    assert measured(first_s=0.003).choose(100, num_waiting_tokens=1_600).head_start_s == pytest.approx(0.30)


def test_a_short_prefix_is_waited_for_longer_where_loading_is_a_clear_gain() -> None:
    """3 blocks: 30 ms to compute, 5 ms to load; 4.5 ms would not do."""
    plan = measured(first_s=0.004, block_s=0.0005).choose(3)
    assert plan.loads
    assert plan.head_start_s == pytest.approx(0.01)


def test_a_short_prefix_that_loads_hardly_faster_is_computed() -> None:
    assert measured(first_s=0.019).choose(2) == SKIP


def test_a_store_half_as_fast_as_the_engine_meets_it() -> None:
    """100 blocks in 1 s or 2 s; both together in 0.67 s."""
    assert measured(first_s=0.01, block_s=0.02).choose(100) == AT_ONCE


def test_a_store_of_1_mb_a_second_is_not_asked() -> None:
    """A block of 360 KiB in 0.37 s: 2 of 100 blocks would be there in time."""
    assert measured(first_s=0.37, block_s=0.37).choose(100) == SKIP


def test_a_stalled_store_is_not_waited_for_again_and_tried_without_a_head_start() -> None:
    costs = measured(first_s=0.003, block_s=0.0005)
    costs.stalled(1.0)
    assert [costs.choose(100) for _ in range(16)] == [*[SKIP] * 15, AT_ONCE]
    costs.loaded(100, 0.003, 0.05)
    assert costs.choose(100).head_start_s == pytest.approx(0.15)


def test_one_slow_load_does_not_turn_the_choice() -> None:
    costs = measured(first_s=0.003, block_s=0.0005)
    costs.loaded(100, 0.05, 0.15)
    assert costs.choose(100).head_start_s > 0


def test_a_store_that_is_fast_again_is_waited_for_again_at_once() -> None:
    costs = measured(first_s=0.37, block_s=0.37)
    assert costs.choose(100) == SKIP
    costs.loaded(100, 0.003, 0.05)
    assert costs.choose(100).head_start_s == pytest.approx(0.15)


def test_a_step_of_a_few_tokens_says_nothing_of_prompts() -> None:
    costs = measured(first_s=0.003)
    costs.computed(2, 1.0)
    assert costs.choose(100).head_start_s == pytest.approx(0.15)


def test_always_means_always() -> None:
    costs = LoadOrCompute(16, always_head_start_s=5.0)
    costs.computed(512, 0.001)
    costs.stalled(100.0)
    assert costs.choose(1) == LoadPlan(loads=True, head_start_s=5.0)
