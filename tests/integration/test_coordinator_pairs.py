"""Requests go where they cost least, by what the nodes say that they measured."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.cluster import NodeRates
from kvrelay.types import Role
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends
from tests.support.fake_nodes import ANSWER_TEXT, FakeNode

FAST = NodeRates(prefill_tokens_per_s=1_000.0, handoff_bytes_per_s=1e9)  # the prompt has 100 tokens


async def say(cluster: Ends, node: FakeNode, rates: NodeRates, *, num_waiting_tokens: int = 0, slots: int = 4) -> None:
    """The coordinator knows this of the node when it returns."""
    node.rates, node.num_waiting_tokens, node.num_slots_free = rates, num_waiting_tokens, slots
    node.tell()
    wanted = (node.address, rates, num_waiting_tokens, slots)
    await cluster.until_status(
        lambda status: (
            wanted
            in {
                (
                    report.info.address,
                    report.status.rates,
                    report.status.num_waiting_tokens,
                    report.status.num_slots_free,
                )
                for report in status.nodes
            }
        )
    )


async def test_a_prompt_goes_past_a_long_queue_to_an_idle_prefill_node() -> None:
    async with ends(num_prefill=2) as cluster:
        first, second = cluster.prefill
        await say(cluster, first, FAST, num_waiting_tokens=5_000)
        await say(cluster, second, FAST)
        await cluster.ask()
        assert [len(node.requests) for node in cluster.prefill] == [0, 1]


async def test_a_decode_node_computes_a_prompt_that_would_wait_longer_for_a_prefill_node() -> None:
    async with ends() as cluster:
        await say(cluster, cluster.prefill[0], FAST, num_waiting_tokens=5_000)
        await say(cluster, cluster.decode[0], NodeRates(prefill_tokens_per_s=100.0))
        answer = await cluster.ask()
        assert cluster.prefill[0].requests == []
        assert answer.finished is not None
        assert cluster.metric("kvrelay_request_edges_total", edge="tail_sent") == 1


async def test_a_prefill_node_that_filled_up_since_the_placement_is_passed() -> None:
    async with ends(num_prefill=2) as cluster:
        first, second = cluster.prefill
        await say(cluster, first, FAST, num_waiting_tokens=5_000)
        await say(cluster, second, FAST)
        cluster.decode[0].at["reserve"].hold()
        asking = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("reserve")
        await say(cluster, second, FAST, slots=0)
        cluster.decode[0].at["reserve"].let_go()
        await asking
        assert [len(node.requests) for node in cluster.prefill] == [1, 0]


async def test_what_came_is_counted_against_what_was_forecast_and_nothing_where_nothing_was() -> None:
    async with ends() as cluster:
        await cluster.ask()
        assert cluster.metric("kvrelay_prediction_error_seconds_count", of="ttft") == 0
        await say(cluster, cluster.prefill[0], FAST)
        await say(cluster, cluster.decode[0], NodeRates(step_s=0.01))
        await cluster.ask()
        assert cluster.metric("kvrelay_prediction_error_seconds_count", of="ttft") == 1
        assert cluster.metric("kvrelay_prediction_error_seconds_count", of="itl") == 1
        assert cluster.metric("kvrelay_prediction_ratio_count", of="ttft") == 1


@pytest.mark.parametrize("rates", [FAST, NodeRates()], ids=["measured", "not measured"])
@pytest.mark.parametrize("role", [Role.DECODE_NODE, Role.PREFILL_NODE])
async def test_a_weight_that_becomes_0_while_a_request_is_placed_fails_nobody(role: Role, rates: NodeRates) -> None:
    """By a decode node that granted its room the request goes on; a prefill node is waited for, as one that is gone."""
    async with ends() as cluster, asyncio.timeout(TIMEOUT_S):
        for node in cluster.nodes:
            await say(cluster, node, rates)
        (changed,) = (node for node in cluster.nodes if node.role is role)
        cluster.decode[0].at["reserve"].hold()
        asking = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("reserve")
        await weigh(cluster, changed, 0.0)
        cluster.decode[0].at["reserve"].let_go()
        if role is Role.PREFILL_NODE:
            await cluster.decode[0].until_reached("granted")
            await cluster.decode[0].until(lambda: cluster.decode[0].idle)
            await weigh(cluster, changed, 1.0)
        assert (await asking).text == ANSWER_TEXT


async def weigh(cluster: Ends, node: FakeNode, weight: float) -> None:
    """The coordinator knows of it when it returns."""
    node.control.weight = weight
    node.tell()
    await cluster.until_status(
        lambda status: {report.info.address: report.status.weight for report in status.nodes}[node.address] == weight
    )
