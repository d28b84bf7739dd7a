"""Which pair of nodes a request goes to."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.calibration import Calibration, PlacedForecast, Way
from coordinator.circuits import Party
from coordinator.forecast import forecast_handoff, forecast_tail
from coordinator.members import Member
from coordinator.pair import Pair
from coordinator.pair_cost import PairCosts
from coordinator.work import Work
from kvrelay.types import InstanceId
from tests.support.pair_nodes import BLOCK_BYTES, BLOCK_TOKENS, decode_node, prefill_node

P1, P2, D1, D2 = (InstanceId(name) for name in ("p1", "p2", "d1", "d2"))
FULL = {"free": 0, "cached": 1_000}  # of a decode node's blocks


def work(num_tokens: int = 1_000, num_left: int = 100, **changes: Any) -> Work:
    caches = {"cached_prefill": {}, "cached_decode": {}, **changes}
    return Work(num_tokens, num_tokens + num_left, BLOCK_TOKENS, BLOCK_BYTES, **caches)


def rank_pairs(*args: Any, **settings: Any) -> list[Pair]:
    return PairCosts(*args, **settings).ranked()


def name(member: Member | None) -> str:
    return "-" if member is None else member.info.instance_id


def names(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(name(pair.prefill), name(pair.decode)) for pair in pairs]


def best(*args: Any, **settings: Any) -> tuple[str, str]:
    return names(rank_pairs(*args, **settings))[0]


@pytest.mark.parametrize(("waiting_tokens", "chosen"), [(639, "p1"), (641, "p2")])
def test_a_prefix_is_worth_the_wait_that_it_spares_and_no_more(waiting_tokens: int, chosen: str) -> None:
    """640 of 1,000 tokens are cached on p1, which is busy; p2 is idle."""
    nodes = [prefill_node("p1", running=2, waiting_tokens=waiting_tokens), prefill_node("p2")]
    assert best(nodes, [decode_node()], work(cached_prefill={P1: 40})) == (chosen, "d1")


@pytest.mark.parametrize(("running", "chosen"), [(19, "-"), (20, "p1")])
def test_a_decode_node_computes_what_it_lacks_until_that_costs_its_sequences_more(running: int, chosen: str) -> None:
    """24 tokens at 500 a second take each sequence 48 ms, the new one too; the prefill node takes a second for all."""
    decode = decode_node(rate=500, running=running)
    costs = work(cached_decode={D1: 61})
    assert best([prefill_node()], [decode], costs, local_tail_tokens=32) == (chosen, "d1")


@pytest.mark.parametrize(("waiting_tokens", "chosen"), [(900, "p1"), (1_100, "-")])
def test_an_idle_decode_node_computes_a_whole_prompt_where_the_queue_is_longer(
    waiting_tokens: int, chosen: str
) -> None:
    """It takes 2 ms a token, so 2 s; the prefill node takes 1 s once its turn has come."""
    prefill = prefill_node(running=2, waiting_tokens=waiting_tokens)
    assert best([prefill], [decode_node(rate=500)], work(), local_tail_tokens=32) == (chosen, "d1")


def test_a_node_that_got_weight_0_while_the_request_asked_for_room_is_passed_over_or_has_what_it_granted() -> None:
    """The decode node has granted its blocks already, so it goes on; the prefill node was not asked yet."""
    prefill, decode = [prefill_node("p1"), prefill_node("p2")], decode_node(rate=500)
    costs = PairCosts(prefill, [decode], work(), local_tail_tokens=32)
    assert names(costs.ranked()) == [("p1", "d1")]
    for member in (prefill[0], decode):
        member.status = replace(member.status, weight=0.0)
    pair = costs.pair_with(decode, 0)
    assert pair is not None
    assert names([pair]) == [("p2", "d1")]
    assert PairCosts(prefill, [decode], work()).ranked() == []


@pytest.mark.parametrize("settings", [{"local_tail_tokens": 0}, {}])
def test_without_local_tails_every_prompt_is_handed_over(settings: dict[str, int]) -> None:
    prefill = prefill_node(running=4, waiting_tokens=50_000)
    assert best([prefill], [decode_node(rate=500)], work(cached_decode={D1: 62}), **settings) == ("p1", "d1")


@pytest.mark.parametrize(("num_cached", "chosen"), [(61, "-"), (60, "p1")])
def test_the_setting_decides_while_the_decode_node_has_not_measured_prompts(num_cached: int, chosen: str) -> None:
    """24 tokens are short, 40 are not."""
    costs = work(cached_decode={D1: num_cached})
    assert best([prefill_node()], [decode_node()], costs, local_tail_tokens=32) == (chosen, "d1")
    assert best([prefill_node(rate=0)], [decode_node()], costs, local_tail_tokens=32) == (chosen, "d1")


def test_a_slow_link_draws_to_the_decode_node_that_has_the_prefix() -> None:
    """40 of 63 blocks are on d2, whose steps are longer by 1 ms: 64 counted tokens make 64 ms. At 20 blocks a second
    that is nothing; at 20,000 it is more than the blocks."""
    decode = [decode_node("d1", step_s=0.010), decode_node("d2", step_s=0.011)]
    costs = work(cached_decode={D2: 40})
    assert best([prefill_node(link=320_000)], decode, costs) == ("p1", "d2")
    assert best([prefill_node(link=320e6)], decode, costs) == ("p1", "d1")


def test_a_sequence_more_counts_for_those_beside_it_too() -> None:
    """d1 has 4 sequences and steps of 10 + 2 ms each; d2 has 1 and a fixed 19 ms. A token costs 20 + 4 x 2 on d1."""
    decode = [decode_node("d1", running=4, step_s=0.010, row_s=0.002), decode_node("d2", running=1, step_s=0.027)]
    assert best([prefill_node()], decode, work()) == ("p1", "d2")
    decode[1] = decode_node("d2", running=1, step_s=0.029)
    assert best([prefill_node()], decode, work()) == ("p1", "d1")


def test_a_decode_node_that_has_just_joined_is_taken_for_one_like_the_others() -> None:
    """It has measured no step, and yet is none that takes no time."""
    decode = [decode_node("d1"), decode_node("d2", step_s=0.01), decode_node("d3", step_s=0.03)]
    assert [one for _, one in names(rank_pairs([prefill_node()], decode, work()))] == ["d2", "d1", "d3"]


def test_a_full_batch_is_waited_for() -> None:
    decode = [
        decode_node("d1", running=8, step_s=0.01, max_batch=8),
        decode_node("d2", running=8, step_s=0.011, max_batch=64),
    ]
    assert best([prefill_node()], decode, work()) == ("p1", "d2")


def test_equals_are_told_apart_by_load_and_then_by_name() -> None:
    prefill = [prefill_node("p3"), prefill_node("p2", running=1), prefill_node("p1", running=1)]
    decode = [decode_node("d2"), decode_node("d1", running=2), decode_node("d3")]
    assert best(prefill, decode, work()) == ("p3", "d2")
    assert names(rank_pairs(prefill, decode, work(num_left=1))) == [("p3", "-"), ("p1", "-"), ("p2", "-")]


def test_of_more_equals_than_are_looked_at_closely_the_least_loaded_and_first_by_name_are() -> None:
    """All cost the same, since nothing waits; the busier ones come last, whichever place they have."""
    prefill = [prefill_node(f"p{number:02}", running=number % 2) for number in range(19, -1, -1)]
    ranked = names(rank_pairs(prefill, [], work(num_left=1)))
    assert ranked == [(f"p{number:02}", "-") for number in range(0, 16, 2)]


def test_weight_divides_what_a_node_costs_and_0_takes_it_out() -> None:
    prefill = [prefill_node("p1", running=1, waiting_tokens=900, weight=2.0), prefill_node("p2")]
    assert best(prefill, [decode_node()], work()) == ("p1", "d1")
    prefill[0] = prefill_node("p1", running=2, waiting_tokens=1_100, weight=2.0)
    assert best(prefill, [decode_node()], work()) == ("p2", "d1")
    decode = [decode_node("d1", weight=0.0), decode_node("d2", running=30, step_s=1.0)]
    assert names(rank_pairs(prefill, decode, work())) == [("p2", "d2")]
    assert rank_pairs([prefill_node(weight=0.0)], decode, work()) == []


def test_nodes_too_small_are_no_candidates_and_an_answer_beyond_all_prefill_nodes_is_computed_on_decode_nodes() -> None:
    decode = [decode_node("d1", total=68), decode_node("d2", total=69)]
    assert names(rank_pairs([prefill_node(total=63)], decode, work())) == [("p1", "d2")]
    assert names(rank_pairs([prefill_node(total=62)], decode, work())) == [("-", "d2")]
    assert best([prefill_node(total=62)], decode, work(num_left=1)) == ("-", "d1")


def test_without_any_prefill_node_only_short_tails_go() -> None:
    assert rank_pairs([], [decode_node(rate=500)], work(), local_tail_tokens=32) == []
    costs = work(cached_decode={D1: 62})
    assert names(rank_pairs([], [decode_node(rate=500)], costs, local_tail_tokens=32)) == [("-", "d1")]


@pytest.mark.parametrize("rate", [0.0, 1_000.0])
def test_busy_crowded_suspect_and_avoided_nodes_come_later_and_later(rate: float) -> None:
    decode = [decode_node("d1"), decode_node("d2", free=60), decode_node("d3"), decode_node("d4"), decode_node("d5")]
    ranked = rank_pairs(
        *([prefill_node(rate=rate)], decode, work()),
        suspects={(InstanceId("d3"),)},
        avoid={(InstanceId("d1"),), (InstanceId("d4"), InstanceId("x"))},
    )
    assert [decode_name for _, decode_name in names(ranked)] == ["d4", "d5", "d2", "d3", "d1"]
    prefill = [prefill_node("p1", rate=rate, slots=0), prefill_node("p2", rate=rate), prefill_node("p3", rate=rate)]
    failed: dict[str, set[Party]] = {"suspects": {(P2,)}, "avoid": {(InstanceId("p3"),)}}
    ranked = rank_pairs(prefill, decode, work(num_left=1), **failed)
    assert [prefill_name for prefill_name, _ in names(ranked)] == ["p1", "p2", "p3"]


@pytest.mark.parametrize("rate", [0.0, 1_000.0])
@pytest.mark.parametrize("how", ["suspects", "avoid"])
def test_a_link_that_failed_is_passed_by_another_prefill_node(rate: float, how: str) -> None:
    prefill = [prefill_node("p1", rate=rate), prefill_node("p2", rate=rate, running=1, waiting_tokens=700)]
    parties: dict[str, set[Party]] = {how: {(P1, D1)}}
    assert best(prefill, [decode_node()], work(), **parties) == ("p2", "d1")
    assert best(prefill, [decode_node("d2")], work(), **parties) == ("p1", "d2")


@pytest.mark.parametrize("rate", [0.0, 1_000.0])
def test_a_decode_node_that_no_link_reaches_comes_last(rate: float) -> None:
    prefill = [prefill_node("p1", rate=rate), prefill_node("p2", rate=rate)]
    decode = [decode_node("d1"), decode_node("d2", running=9, step_s=0.01, row_s=0.01)]
    parties: set[Party] = {(P1, D1), (P2, D1)}
    assert [one for _, one in names(rank_pairs(prefill, decode, work(), suspects=parties))] == ["d2", "d1"]


@pytest.mark.parametrize("rate", [0.0, 1_000.0])
def test_where_every_prefill_node_is_suspect_the_least_loaded_is_taken(rate: float) -> None:
    prefill = [prefill_node(f"p{number}", rate=rate, running=number != 2) for number in (1, 4, 3, 2)]
    suspects: set[Party] = {(member.info.instance_id,) for member in prefill}
    assert best(prefill, [decode_node()], work(), suspects=suspects) == ("p2", "d1")


def test_where_every_prefill_node_is_suspect_decode_nodes_that_are_not_still_come_first() -> None:
    decode = [decode_node("d1"), decode_node("d2", running=9, step_s=0.01, row_s=0.01)]
    assert best([prefill_node()], decode, work(), suspects={(P1,), (D1,)}) == ("p1", "d2")


def test_what_the_decode_node_turns_out_to_have_settles_who_computes() -> None:
    decode = decode_node(rate=500)
    costs = PairCosts([prefill_node()], [decode], work(), local_tail_tokens=32)
    assert names(costs.ranked()) == [("p1", "d1")]
    settled = costs.pair_with(decode, num_cached_blocks=62)
    assert settled is not None
    assert names([settled]) == [("-", "d1")]


def test_a_pair_says_what_it_is_thought_to_cost() -> None:
    ranked = rank_pairs([prefill_node()], [decode_node(step_s=0.01)], work())
    assert [str(pair) for pair in ranked] == ["d1, prompt by p1: first token in 1 s, costs 1.64 s"]
    assert str(rank_pairs([prefill_node(rate=0)], [decode_node()], work())[0]) == "d1, prompt by p1: not measured yet"


def test_all_prefill_nodes_stand_in_line_for_a_retry() -> None:
    prefill = [prefill_node("p1"), prefill_node("p2", running=1, waiting_tokens=50), prefill_node("p3", slots=0)]
    costs = PairCosts(prefill, [decode_node()], work(), avoid={(P1, D1)})
    assert [name(one) for one in costs.prefill_for(decode_node())] == ["p2", "p3", "p1"]
    assert [name(one) for one in costs.prefill_for(None)] == ["p1", "p2", "p3"]


def test_the_quickest_node_need_not_be_the_one_that_is_taken_now() -> None:
    """p1 takes 1 s for the prompt, behind 9 s of others; p2 takes 5 s. d1 has work, so it does not tell what an answer
    alone would get there."""
    prefill = [prefill_node("p1", running=9, waiting_tokens=9_000), prefill_node("p2", rate=200)]
    decode = [decode_node("d1", running=9, step_s=0.01, row_s=0.02), decode_node("d2", step_s=0.1)]
    costs = PairCosts(prefill, decode, work())
    assert names(costs.ranked())[0] == ("p2", "d2")
    assert costs.least_ttft_s() == pytest.approx(1.0)
    assert costs.least_itl_s() == 0.0
    assert PairCosts(prefill, decode[1:], work()).least_itl_s() == pytest.approx(0.1)
    assert PairCosts([*prefill, prefill_node("p3", rate=0)], decode, work()).least_ttft_s() == 0.0
    tail = PairCosts(prefill, [decode_node("d1", rate=2_000)], work(), local_tail_tokens=32)
    assert tail.least_ttft_s() == pytest.approx(0.5)


def test_what_came_of_others_decides_too() -> None:
    """Handoffs come 0.5 s later than worked out, so a decode node that takes 0.3 s longer is the better choice."""
    calibration = Calibration()
    args = [prefill_node()], [decode_node(rate=1_000 / 1.3)], work()
    assert names(PairCosts(*args, local_tail_tokens=32).ranked()) == [("p1", "d1")]
    for _ in range(20):
        calibration.first_token(PlacedForecast(Way.HANDOFF, 1.0, 1.0, 0.0, at=10.0), now=11.5)
    assert names(PairCosts(*args, local_tail_tokens=32, calibration=calibration).ranked()) == [("-", "d1")]


nodes = st.fixed_dictionaries(
    {
        "running": st.integers(0, 5),
        "waiting_tokens": st.sampled_from([0, 0, 100, 5_000]),
        "weight": st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0]),
        "rate": st.sampled_from([0.0, 500.0, 1_000.0, 1_000.0, float("nan")]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_order_is_one_and_no_suspect_goes_before_another_that_can(data: st.DataObject) -> None:
    num_prefill, num_decode = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    prefill = [
        prefill_node(f"p{index}", slots=data.draw(st.integers(0, 1)), **data.draw(nodes))
        for index in range(num_prefill)
    ]
    decode = [
        decode_node(f"d{index}", free=data.draw(st.sampled_from([10, 1_000])), **data.draw(nodes))
        for index in range(num_decode)
    ]
    ids = [member.info.instance_id for member in (*prefill, *decode)]
    alone = st.tuples(st.sampled_from(ids)) if ids else st.nothing()
    suspects = data.draw(st.sets(alone, max_size=24)) if ids else set()
    cached = data.draw(st.dictionaries(st.sampled_from(ids), st.integers(1, 62), max_size=6)) if ids else {}
    request = work(num_left=data.draw(st.sampled_from([1, 2, 200])), cached_prefill=cached, cached_decode=cached)
    settings = {"suspects": suspects, "local_tail_tokens": data.draw(st.sampled_from([0, 32]))}
    ranked = rank_pairs(prefill, decode, request, **settings)
    shuffled = [random.Random(1).sample(members, len(members)) for members in (prefill, decode)]
    assert names(rank_pairs(*shuffled, request, **settings)) == names(ranked)
    usable = [one for one in prefill if one.status.weight > 0]
    if not ranked:
        return
    chosen = ranked[0]
    for member, others in ((chosen.prefill, usable), (chosen.decode, [one for one in decode if one.status.weight > 0])):
        if member is not None and (member.info.instance_id,) in suspects:
            assert all((one.info.instance_id,) in suspects for one in others if others is usable or _can(one, ranked))


@pytest.mark.parametrize("seed", range(8))
def test_of_many_nodes_the_best_pair_is_found_as_if_every_pair_was_looked_at(seed: int) -> None:
    """On links alike and fast."""
    taken_s, least_s = _taken_and_least(seed, links=[1e7])
    assert taken_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize("links", [[1e5, 1e5, 1e5, 1e7], [1e5, 1e6, 1e7]])
def test_among_slow_links_and_fast_ones_the_pair_taken_is_nearly_the_best(links: list[float]) -> None:
    """At 100 kB a second a link takes 10 s for the prompt, at 10 MB 0.1 s, and computing it from 0.5 to 2 s."""
    ratios = [taken_s / least_s for taken_s, least_s in (_taken_and_least(seed, links) for seed in range(20))]
    assert max(ratios) < 1.2
    assert sum(ratio > 1 + 1e-9 for ratio in ratios) <= 3


def _taken_and_least(seed: int, links: list[float]) -> tuple[float, float]:
    """What the pair taken among 40 nodes of each kind costs, and the best one, as worked out from each pair's own
    parts."""
    draw = random.Random(seed)
    prefill = [
        prefill_node(
            f"p{index:02}", rate=draw.uniform(500, 2_000), running=draw.randint(0, 3), link=draw.choice(links),
            waiting_tokens=draw.randint(0, 3_000), weight=draw.choice([0.5, 1.0, 2.0]), cached=draw.choice([0, 1_000]),
        )
        for index in range(40)
    ]  # fmt: skip
    decode = [
        decode_node(
            f"d{index:02}", rate=draw.uniform(100, 2_000), running=draw.randint(0, 70), step_s=draw.uniform(0.01, 0.03),
            row_s=0.0005, waiting_tokens=draw.choice([0, 0, 600]), weight=draw.choice([0.5, 1.0, 2.0]),
            **draw.choice([{}, FULL]),
        )
        for index in range(40)
    ]  # fmt: skip
    cached_prefill = {one.info.instance_id: draw.randint(1, 63) for one in draw.sample(prefill, 20)}
    cached_decode = {one.info.instance_id: draw.randint(1, 63) for one in draw.sample(decode, 20)}
    request = work(cached_prefill=cached_prefill, cached_decode=cached_decode)
    ranked = rank_pairs(prefill, decode, request, local_tail_tokens=32)
    least_s = min(_cost_s(one, other, request) for one in (None, *prefill) for other in decode)
    return ranked[0].cost_s, least_s


def _cost_s(prefill: Member | None, decode: Member, request: Work) -> float:
    """As docs/scheduling.md has it; every node has measured all."""
    node, weight = decode.load, decode.status.weight
    rows_s = node.num_rows * 0.0005 + node.next_step_s * (1 + max(0, node.num_requests + 1 - 64) / 64)
    answer_s = 64 * rows_s + (node.waiting_tokens + _evicted(decode, 69, request.cached_decode)) * node.token_s
    if prefill is not None:
        forecast = forecast_handoff(prefill, decode, request, 0.0)
        own = request.num_uncached(request.cached_prefill.get(prefill.info.instance_id, 0))
        shorter_first = min(prefill.status.num_waiting_tokens, own * prefill.status.num_running)
        rate = prefill.status.rates.prefill_tokens_per_s
        others_s = (
            max(0.0, shorter_first / rate - forecast.queue_s) + _evicted(prefill, 63, request.cached_prefill) / rate
        )
        return (forecast.ttft_s + others_s) / prefill.status.weight + answer_s / weight
    forecast = forecast_tail(decode, request, 0.0)
    num_uncached = request.num_uncached(request.cached_decode.get(decode.info.instance_id, 0))
    return (forecast.ttft_s + answer_s + node.num_rows * num_uncached * node.token_s) / weight


def _evicted(member: Member, num_blocks: int, cached: Mapping[InstanceId, int]) -> float:
    """A tenth of the tokens; the pools are empty, or full of what is cached."""
    return 0.0 if member.status.blocks.free else 1.6 * (num_blocks - cached.get(member.info.instance_id, 0))


def _can(decode: Member, ranked: list[Pair]) -> bool:
    """Whether a pair with it was to be had whose prefill node is no suspect either."""
    return any(pair.decode is decode for pair in ranked)


def test_a_short_prompt_goes_where_it_holds_up_fewer_long_ones() -> None:
    """500 tokens. It would pass three of 3,000 tokens on p1, which would wait for it, or one on p2, which is slower."""
    nodes = [
        prefill_node("p1", running=3, waiting_tokens=9_000),
        prefill_node("p2", rate=900, running=1, waiting_tokens=3_000),
    ]
    (pair,) = rank_pairs(nodes, [decode_node()], work(500))
    assert names([pair]) == [("p2", "d1")]
    assert pair.forecast is not None
    assert pair.forecast.ttft_s == pytest.approx((256 + 2 * 512) / 900)  # half of the step that runs and two more
    assert pair.cost_s == pair.forecast.ttft_s, "the other waits for no more than it does"


@pytest.mark.parametrize(("cached_prefill", "chosen"), [({}, "p2"), ({P1: 2}, "p2"), ({P1: 10}, "p1")])
def test_of_idle_prefill_nodes_the_empty_one_is_filled_before_the_other_evicts(
    cached_prefill: dict[InstanceId, int], chosen: str
) -> None:
    """p2 is 5 % slower; p1 would evict 63 blocks, 1.6 tokens each to compute once more, less what it has already."""
    nodes = [prefill_node("p1", cached=1_000), prefill_node("p2", rate=950)]
    for num_left in (100, 1):
        wanted = work(num_left=num_left, cached_prefill=cached_prefill)
        assert best(nodes, [decode_node()], wanted)[0] == chosen


@pytest.mark.parametrize(("cached_decode", "chosen"), [({}, "d2"), ({D1: 40}, "d1")])
def test_of_idle_decode_nodes_the_empty_one_is_filled_before_the_other_evicts(
    cached_decode: dict[InstanceId, int], chosen: str
) -> None:
    """d2's steps are 5 % longer, 32 ms in all; d1 would evict 69 blocks, 110 ms. The link carries 20 a second."""
    decode = [decode_node("d1", step_s=0.010, **FULL), decode_node("d2", step_s=0.0105)]
    wanted = work(cached_decode=cached_decode)
    assert best([prefill_node(link=320_000)], decode, wanted) == ("p1", chosen)


def test_what_others_were_sent_while_a_decode_node_was_asked_counts() -> None:
    """Three tries of one moment rank the same prefill nodes; each goes on once its decode node has granted room."""
    prefill, decode = [prefill_node(name) for name in ("p1", "p2", "p3")], decode_node()
    tries = [PairCosts(prefill, [decode], work()) for _ in range(3)]
    chosen = []
    for costs in tries:
        pair = costs.pair_with(decode, 0)
        assert pair is not None
        assert pair.prefill is not None
        pair.prefill.assign(1_000)
        chosen.append(name(pair.prefill))
    assert chosen == ["p1", "p2", "p3"]
