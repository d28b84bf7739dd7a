"""Which node is asked first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.members import Member
from coordinator.router import has_slot, rank_decode, rank_prefill
from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.types import BlockCounts, BlockHash, InstanceId, Role

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(char.encode()) for char in text]


def member(
    name: str,
    *,
    total: int = 100,
    free: int = 100,
    running: int = 0,
    slots: int = 4,
    assigned: int = 0,
    weight: float = 1.0,
) -> Member:
    blocks = BlockCounts(total=total, free=free, held=total - free)
    status = NodeStatus(ready=True, blocks=blocks, num_running=running, num_slots_free=slots, weight=weight)
    member = Member(NodeInfo(Role.DECODE_NODE, InstanceId(name), name, None), status, 0.0)
    for _ in range(assigned):
        member.assign(num_tokens=0)
    return member


def names(members: list[Member]) -> str:
    return "".join(one.info.instance_id for one in members)


def test_least_loaded_decode_node_comes_first() -> None:
    members = [member("a", running=3), member("b", running=1), member("c", running=1, assigned=1)]
    assert names(rank_decode(members, {}, num_blocks=10)) == "bca"


def test_cached_prefix_outweighs_some_load() -> None:
    members = [member("a", running=2), member("b")]
    assert names(rank_decode(members, {A: 7}, num_blocks=10)) == "ba"
    assert names(rank_decode(members, {A: 9}, num_blocks=10)) == "ab"


def test_crowded_failed_and_too_small_nodes() -> None:
    members = [member("a", free=5), member("b", running=20), member("c", total=9), member("d")]
    assert names(rank_decode(members, {}, num_blocks=10, avoid={InstanceId("d")})) == "bad"
    assert names(rank_decode(members, {A: 5}, num_blocks=10)) == "adb"  # five more fit beside its cached ones


def test_a_node_whose_answers_grow_is_crowded_later_and_still_has_to_hold_the_whole() -> None:
    members = [member("a", free=5), member("b", running=20), member("c", total=9)]
    now = {"a": 4, "b": 10, "c": 4}
    ranked = rank_decode(members, {}, num_blocks=10, num_blocks_now=lambda one: now[one.info.instance_id])
    assert names(ranked) == "ab"


def test_prefill_nodes_with_a_slot_come_first() -> None:
    members = [member("a", slots=0), member("b", running=3), member("c", slots=2, assigned=2, running=1)]
    assert names(rank_prefill(members, {}, num_blocks=10)) == "bac"
    assert names(rank_prefill(members, {}, num_blocks=10, avoid={B})) == "acb"
    assert [has_slot(one) for one in members] == [False, True, False]


RANKINGS = pytest.mark.parametrize("rank", [rank_decode, rank_prefill])


@RANKINGS
def test_requests_are_shared_out_by_weight(rank: Callable[..., list[Member]]) -> None:
    members = [
        member(name, total=10_000, slots=1_000, weight=weight) for name, weight in zip("abc", (1, 3, 0.5), strict=True)
    ]
    chosen = ""
    for _ in range(36):
        first = rank(members, {}, num_blocks=10)[0]
        first.assign(num_tokens=0)
        chosen += names([first])
    assert [chosen.count(name) for name in "abc"] == [8, 24, 4]


@RANKINGS
def test_of_idle_nodes_the_one_of_most_weight_comes_first_and_weight_0_is_no_candidate(
    rank: Callable[..., list[Member]],
) -> None:
    members = [member("a"), member("b", weight=0.0), member("c", weight=1.5)]
    assert names(rank(members, {}, num_blocks=10)) == "ca"
    assert names(rank(members, {A: 99, B: 99}, num_blocks=10)) == "ac"


def test_long_cached_prefix_is_worth_a_wait_at_a_prefill_node() -> None:
    members = [member("a", running=1), member("b")]
    assert names(rank_prefill(members, {A: 31}, num_blocks=100)) == "ba"
    assert names(rank_prefill(members, {A: 33}, num_blocks=100)) == "ab"
