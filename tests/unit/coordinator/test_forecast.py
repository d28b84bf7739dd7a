"""What a request would get on a pair of nodes, against sums made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.forecast import forecast_handoff, forecast_tail, tokens_lost, usual_token_s
from coordinator.work import Work
from kvrelay.types import InstanceId
from tests.support.pair_nodes import BLOCK_BYTES, BLOCK_TOKENS, decode_node, prefill_node

P1, D1 = InstanceId("p1"), InstanceId("d1")
NO_RATES = [0.0, -1.0, math.nan, math.inf]


def work(num_tokens: int = 1_000, num_left: int = 100, **changes: Any) -> Work:
    """1,000 tokens in 63 blocks."""
    caches = {"cached_prefill": {}, "cached_decode": {}, **changes}
    return Work(num_tokens, num_tokens + num_left, BLOCK_TOKENS, BLOCK_BYTES, **caches)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached_blocks", "num_uncached"),
    [(1_000, 0, 1_000), (1_000, 2, 968), (1_000, 62, 8), (1_000, 63, 8), (992, 62, 16), (1, 1, 1), (16, 1, 16)],
)
def test_at_least_the_last_token_is_computed(num_tokens: int, num_cached_blocks: int, num_uncached: int) -> None:
    assert work(num_tokens).num_uncached(num_cached_blocks) == num_uncached


def test_a_handoff_is_the_queue_the_prompt_and_its_last_chunk() -> None:
    """Behind a step of 500 tokens, half of which is done; 1,000 tokens; then 32 blocks of the last 512 tokens at a
    thousand blocks a second. Of the answer, steps of 10 ms and 2 ms for each of four sequences, the new one among
    them."""
    prefill = prefill_node(running=1, waiting_tokens=500, link=16e6)
    decode = decode_node(running=3, step_s=0.010, row_s=0.002)
    forecast = forecast_handoff(prefill, decode, work(), 0.0)
    assert forecast.queue_s == pytest.approx(0.25)
    assert forecast.load_s == 0.0
    assert forecast.prefill_s == pytest.approx(1.0)
    assert forecast.handoff_s == pytest.approx(0.032)
    assert forecast.ttft_s == pytest.approx(1.282)
    assert forecast.itl_s == pytest.approx(0.018)


def test_what_an_answer_takes_alone_is_told_of_a_decode_node_that_has_nothing_to_do() -> None:
    idle, busy = (decode_node(running=number, step_s=0.010, row_s=0.002) for number in (0, 1))
    waiting = decode_node(step_s=0.010, row_s=0.002, waiting_tokens=1)
    for forecast in (forecast_handoff(prefill_node(), idle, work(), 0.0), forecast_tail(idle, work(), 0.0)):
        assert forecast.least_itl_s == pytest.approx(0.012)
    assert [forecast_tail(node, work(), 0.0).least_itl_s for node in (busy, waiting)] == [0.0, 0.0]


@pytest.mark.parametrize(("num_new_blocks", "num_tokens"), [(10, 0.0), (12, 3.2), (1_000, 8.0)])
def test_a_tenth_of_what_is_evicted_is_computed_once_more(num_new_blocks: int, num_tokens: float) -> None:
    """10 blocks are free and 5 cached; what is held goes away by itself."""
    node = decode_node(total=100, free=10, cached=5).load
    assert tokens_lost(node, num_new_blocks, 16) == pytest.approx(num_tokens)


def test_a_link_slower_than_the_computing_adds_what_it_could_not_carry_meanwhile() -> None:
    """63 blocks at 20 a second take 3.15 s, of which computing hides 1 s; the last chunk alone takes 1.6 s."""
    forecast = forecast_handoff(prefill_node(link=320_000), decode_node(), work(), 0.0)
    assert forecast.handoff_s == pytest.approx(2.15)


def test_what_is_cached_on_either_side_is_spared() -> None:
    """62 of 63 blocks on the prefill node: 8 tokens to compute, one block in the last chunk, yet all 63 to hand over;
    with 60 of them on the decode node three."""
    prefill = prefill_node(link=16e6)
    cached = work(cached_prefill={P1: 62})
    forecast = forecast_handoff(prefill, decode_node(), cached, 0.0)
    assert (forecast.prefill_s, forecast.handoff_s) == (pytest.approx(0.008), pytest.approx(0.055))
    forecast = forecast_handoff(prefill, decode_node(), work(cached_prefill={P1: 62}, cached_decode={D1: 60}), 0.0)
    assert forecast.handoff_s == pytest.approx(0.001)
    assert forecast_handoff(prefill, decode_node(), work(cached_decode={D1: 63}), 0.0).handoff_s > 0


@pytest.mark.parametrize(
    ("num_stored", "chance", "store", "load_s", "prefill_s"),
    [
        (50, 1.0, 16e6, 0.8 / 17, 0.2),  # 800 tokens at 1,000 blocks a second: 50 ms if the engine did not help
        (50, 0.5, 16e6, 0.4 / 17, 0.6),
        (63, 1.0, 16e6, 0.992 / 17, 0.008),  # the last token is computed, whatever is stored
        (50, 1.0, 1e6, 0.4, 0.2),  # as fast as computing: the two meet half way
        (50, 1.0, 0.0, 0.0, 1.0),  # never loaded anything
        (0, 1.0, 16e6, 0.0, 1.0),
    ],
)
def test_what_is_stored_is_loaded_while_the_engine_computes_towards_it(
    num_stored: int, chance: float, store: float, load_s: float, prefill_s: float
) -> None:
    """Of 1,000 tokens, 62 full blocks of them."""
    wanted = work(num_stored=num_stored, stored_chance=chance)
    forecast = forecast_handoff(prefill_node(store=store), None, wanted, 0.0)
    assert (forecast.queue_s, forecast.load_s) == (0.0, pytest.approx(load_s))
    assert forecast.prefill_s == pytest.approx(prefill_s)
    assert forecast.ttft_s == pytest.approx(load_s + prefill_s)


def test_what_the_node_has_is_not_loaded_and_others_prompts_hide_the_rest() -> None:
    """20 of 50 blocks are here, 480 tokens are not and take 30 ms: others' tokens take longer."""
    wanted = work(num_stored=50, stored_chance=1.0, cached_prefill={P1: 20})
    assert forecast_handoff(prefill_node(store=16e6), None, wanted, 0.0).load_s == pytest.approx(0.48 / 17)
    busy = forecast_handoff(prefill_node(store=16e6, running=1, waiting_tokens=100), None, wanted, 0.0)
    assert (busy.queue_s, busy.load_s) == (pytest.approx(0.05), 0.0)


def test_one_token_needs_no_handoff_and_no_step() -> None:
    forecast = forecast_handoff(prefill_node(link=1e6), None, work(num_left=1), 0.0)
    assert (forecast.ttft_s, forecast.handoff_s, forecast.itl_s) == (1.0, 0.0, 0.0)


def test_a_tail_takes_its_tokens_and_the_steps_of_those_that_run_beside_it() -> None:
    """1,000 tokens at 500 a second, in two steps of at most 509, each with 3 sequences more, which take 16 ms; before
    it a step with 100 tokens."""
    decode = decode_node(rate=500, running=3, step_s=0.010, row_s=0.002, waiting_tokens=100)
    forecast = forecast_tail(decode, work(num_left=50), 0.0)
    assert forecast.queue_s == pytest.approx(0.216)
    assert forecast.prefill_s == pytest.approx(2.0 + 2 * 0.016)
    assert forecast.ttft_s == pytest.approx(2.248)
    assert forecast.itl_s == pytest.approx(0.018 + 0.2 / 50), "other prompts are computed between its tokens"


def test_what_was_sent_since_the_last_status_counts() -> None:
    prefill, decode = prefill_node(), decode_node(step_s=0.01, row_s=0.001)
    assert forecast_handoff(prefill, decode, work(), 0.0).ttft_s == 1.0
    prefill.assign(700)
    decode.assign(0)
    decode.assign(0)
    forecast = forecast_handoff(prefill, decode, work(), 0.0)
    assert (forecast.queue_s, forecast.itl_s) == (pytest.approx(0.444), pytest.approx(0.013))


@pytest.mark.parametrize("odd", NO_RATES)
def test_a_rate_that_is_none_is_taken_as_not_measured(odd: float) -> None:
    prefill, decode = prefill_node(rate=odd, link=odd), decode_node(rate=odd, step_s=odd, row_s=odd)
    forecast = forecast_handoff(prefill, decode, work(), 0.002)
    assert (forecast.ttft_s, forecast.itl_s) == (2.0, 0.0)
    assert forecast_tail(decode, work(), 0.002).ttft_s == 2.0


def test_the_usual_time_of_a_token_is_the_mean_of_those_that_know() -> None:
    assert usual_token_s([prefill_node(rate=0)]) == 0.0
    assert usual_token_s([prefill_node(rate=0), prefill_node(rate=500), prefill_node(rate=1_000)]) == 0.0015
