"""The simulation ends every request once, repeats itself, and takes the time that its parts add up to."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from bench.sim.clock import VirtualClock
from bench.sim.closed_loop import Task, measure
from bench.sim.cluster import Setup, Simulation, simulate
from bench.sim.load import Arrival, azure, block_hashes, cut, mooncake, paced
from bench.sim.placing import Routed
from bench.sim.request import Outcome, SimRequest
from bench.sim.reserving import Expected
from bench.sim.results import Goal, capacity_per_s, goodput, hit_rate
from bench.sim.shapes import NodeShape, StepTime
from bench.sim.tables import cell
from bench.sim.tasks import Options
from coordinator.holders import keys_of

# Round figures: a step of 10 ms and 1 ms a row; prompts at 1 ms a token and 4 ms a step; 1 ms a token on the link.
ROUND = NodeShape(
    token_bytes=1_000,
    link_bytes_per_s=1e6,
    decode=StepTime(0.010, 0.001, 0.002),
    prefill=StepTime(0.004, 0.0, 0.001),
    call_s=0.0005,
    status_interval_s=0.1,
)
ONE_OF_EACH = Setup(num_prefill=1, num_decode=1, shape=ROUND, placing=Routed)


def busy_load(num_requests: int = 100) -> list[Arrival]:
    return paced(cut(azure("conv", 1_024), 0, 3)[:num_requests], 20.0)


def ends(requests: list[SimRequest]) -> list[tuple[str, object, object]]:
    return [(request.request_id, request.outcome, request.ended_at) for request in requests]


def test_two_requests_take_what_their_steps_and_calls_add_up_to() -> None:
    """The second comes while the first one's prompt is computed, and joins its batch between two steps."""
    first, second = Arrival(0.0, 100, 4, 8), Arrival(0.05, 50, 2, 8)
    requests = simulate(ONE_OF_EACH, [first, second]).requests
    by_prompt = {request.arrival.num_prompt: request for request in requests}
    start = by_prompt[100].entered_at
    # Reserve there and back 1 ms, Prefill there 0.5 ms, one step of 104 ms, 100 ms on the link, which starts then, its
    # commit 0.5 ms, the token to the coordinator 0.5 ms.
    assert by_prompt[100].first_token_at == pytest.approx(start + 0.001 + 0.0005 + 0.104 + 0.1 + 0.0005 + 0.0005)
    # The second one's step of 54 ms follows at once; the link is free again 0.2055 s after the start, so its KV is
    # there 50 ms later. Steps of the first alone take 11 ms: three of them end at 0.239, before the second is there.
    assert by_prompt[50].first_token_at == pytest.approx(start + 0.2055 + 0.05 + 0.0005 + 0.0005)
    assert by_prompt[100].ended_at == pytest.approx(start + 0.206 + 3 * 0.011 + 0.0005)
    assert by_prompt[50].ended_at == pytest.approx(start + 0.256 + 0.011 + 0.0005)


def test_a_sequence_that_joins_waits_for_the_end_of_the_step_that_runs() -> None:
    """Steps that are taken as one event are cut where something joins."""
    requests = simulate(ONE_OF_EACH, [Arrival(0.0, 100, 30, 64), Arrival(0.01, 40, 2, 64)]).requests
    long, short = sorted(requests, key=lambda request: -request.arrival.num_output)
    start = long.entered_at
    # KV of the second is there 40 ms after the first one's, at 0.246; the first one's fourth step ends at 0.250.
    assert short.ended_at == pytest.approx(start + 0.250 + 0.012 + 0.0005)
    assert long.ended_at == pytest.approx(start + 0.206 + 28 * 0.011 + 0.012 + 0.0005)


def test_a_short_tail_is_computed_by_the_decode_node() -> None:
    (request,) = simulate(ONE_OF_EACH, [Arrival(0.0, 10, 2, 8)]).requests
    assert (request.is_tail, request.prefill_node) == (True, None)
    # Reserve 1 ms, Decode 0.5 ms; a step of a row and nine more tokens: 10 + 1 + 9 x 2 ms.
    assert request.first_token_at == pytest.approx(request.entered_at + 0.0015 + 0.029 + 0.0005)


def test_every_request_ends_once_and_nothing_is_left_of_it() -> None:
    load = busy_load()
    setup = Setup(num_prefill=1, num_decode=1, max_queue=16, max_queue_wait_s=1.0)
    run = simulate(setup, load)  # looks at pools and queue
    assert Counter(request.arrival for request in run.requests) == Counter(load)
    assert len({request.request_id for request in run.requests}) == len(load)
    outcomes = Counter(request.outcome for request in run.requests)
    assert set(outcomes) == {Outcome.FINISHED, Outcome.TURNED_AWAY, Outcome.GAVE_UP}


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    load, setup = busy_load(60), Setup(num_prefill=2, num_decode=2)
    runs = [ends(simulate(setup, load, seed).requests) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_what_is_not_set_aside_is_taken_from_the_youngest() -> None:
    load = [replace(arrival, at=0.0) for arrival in busy_load(60)]
    shape = replace(NodeShape(), num_decode_blocks=600)
    setup = Setup(num_prefill=2, num_decode=1, shape=shape, reserving=partial(Expected, 0.1))
    learned = [Arrival(0.0, 64, 4, 1_024)] * 20  # answers of four tokens are what it expects from then on
    preempted = sum(request.num_preemptions for request in simulate(setup, [*learned, *load]).requests)
    assert preempted > 0
    full = replace(setup, reserving=Setup().reserving)
    assert sum(request.num_preemptions for request in simulate(full, [*learned, *load]).requests) == 0


def test_a_prompt_is_found_where_it_was_computed() -> None:
    """Four blocks of 512 tokens, the first three of which the second prompt shares."""
    load = [Arrival(0.0, 2_048, 2, 8, hash_ids=(1, 2, 3, 4)), Arrival(60.0, 2_048, 2, 8, hash_ids=(1, 2, 3, 5))]
    run = simulate(replace(ONE_OF_EACH, shape=replace(ROUND, status_interval_s=0.1)), load)
    assert [request.num_cached_prefill for request in run.requests] == [0, 1_536]
    assert hit_rate(run) == pytest.approx(1_536 / 4_096)


def test_who_is_turned_away_comes_back_when_it_was_told_to() -> None:
    setup = Setup(num_prefill=1, num_decode=1, max_queue=4, max_returns=10)
    run = simulate(setup, busy_load(200))
    returned = [request for request in run.requests if request.num_returns]
    assert sum(request.num_returns for request in run.requests) == len(run.returns)
    assert any(request.outcome is Outcome.FINISHED for request in returned)


def test_in_a_closed_loop_first_tokens_come_about_when_they_are_forecast() -> None:
    measured = measure(Task(num_clients=16, number=0, options=Options(num_requests=300, num_slices=1, jobs=1)))
    assert measured.error_p50 < 0.25
    assert measured.factor_p95 < 2.25


def test_a_coordinator_sees_a_status_no_more_often_than_nodes_send_it() -> None:
    """One that never hears again sends all it has room for and no more: places that came free are not known."""
    shape = replace(ROUND, status_interval_s=1_000.0, call_s=0.001)
    simulation = Simulation(replace(ONE_OF_EACH, shape=shape, max_queue_wait_s=5.0), seed=3)
    run = simulation.run([Arrival(0.1 * number, 100, 2, 8) for number in range(12)])
    num_places = shape.prefill_limits.max_prefills + shape.prefill_limits.max_waiting
    assert Counter(request.outcome for request in run.requests) == {
        Outcome.FINISHED: num_places,
        Outcome.GAVE_UP: 12 - num_places,
    }


def test_events_happen_in_order_and_equal_ones_as_they_were_asked_for() -> None:
    clock, seen = VirtualClock(), list[str]()
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(when, seen.append, name)
    clock.run(until=1.5)
    assert (seen, clock.now) == (["a", "b"], 1.0)
    clock.run()
    assert (seen, clock.now, clock.num_events) == (["a", "b", "c"], 2.0, 3)


def test_goodput_counts_what_met_both_targets() -> None:
    run = simulate(ONE_OF_EACH, [Arrival(0.0, 100, 4, 8), Arrival(100.0, 300, 4, 8)])
    assert goodput(run, Goal(ttft_s=0.25, itl_s=0.02), 10.0) == pytest.approx(0.1)  # the second takes 0.6 s
    assert goodput(run, Goal(ttft_s=1.0, itl_s=0.02), 10.0) == pytest.approx(0.2)
    assert goodput(run, Goal(ttft_s=1.0, itl_s=0.01), 10.0) == 0.0


def test_capacity_is_what_the_slowest_part_can_do() -> None:
    """One prefill node that takes 104 ms a prompt and 100 ms a handoff beside it."""
    assert capacity_per_s(ONE_OF_EACH, [Arrival(0.0, 100, 2, 8)] * 40) == pytest.approx(1 / 0.102, rel=0.15)


def test_a_cell_tells_the_median_and_how_far_apart_its_runs_are() -> None:
    assert cell([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert cell([2.0, 2.001]) == "2.00"
    assert cell([math.nan, 7.0], ".0f") == "7"
    assert cell([math.nan]) == "none"


def test_traces_are_whole() -> None:
    assert [len(azure(name, 1_024)) for name in ("conv", "code")] == [19_366, 8_819]
    assert azure("conv", 1_024)[0] == Arrival(0.0, 374, 44, 1_024)
    assert max(arrival.num_output for arrival in azure("code", 256)) == 256
    conversation = mooncake("conversation", 2_048, 200_000)
    assert (len(conversation), conversation[0].num_prompt, len(conversation[0].hash_ids)) == (12_031, 6_758, 14)


def test_blocks_of_a_trace_are_named_alike_and_all_others_apart() -> None:
    first = block_hashes(Arrival(0.0, 1_040, 40, 64, hash_ids=(7, 8, 9)), 16, unique=0)
    second = block_hashes(Arrival(0.0, 1_040, 40, 64, hash_ids=(7, 8, 11)), 16, unique=100)
    assert (len(first), len(second)) == (67, 67)
    assert first[:64] == second[:64]
    assert len(set(first) | set(second)) == 64 + 3 + 3  # the third block's part, and two of each answer
    assert len(set(keys_of([*first, *second]))) == 64 + 3 + 3
