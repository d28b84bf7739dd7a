"""Nodes and links that keep failing, fake nodes: the first requests pay, the next go elsewhere, nobody is refused."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from kvrelay.errors import (
    BadLogitsError,
    CorruptBlockError,
    HandoffFailedError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.kv.circuit import Circuit
from kvrelay.types import InstanceId
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS, FakeDecodeNode, FakePrefillNode

OPEN = "kvrelay_circuits_open"
CUT = HandoffFailedError("decode node 10.0.0.1:7420: no progress on the KV stream for 10 s")


def cut(node: FakePrefillNode, error: KVRelayError = CUT, times: int = 50) -> None:
    """Whatever it sends does not arrive."""
    node.at["compute"].failures = [error] * times


async def answers(cluster: Ends, number: int) -> list[int]:
    """How often each of so many requests, one after another, was tried again."""
    retries = []
    for _ in range(number):
        answer = await cluster.ask(sampling=greedy(max_tokens=5))
        assert answer.token_ids == ANSWER_IDS[:5]
        retries.append(answer.finished.retries)
    return retries


@pytest.fixture
def long_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial comes due while a test counts who is asked, however slow the machine is."""
    monkeypatch.setattr("coordinator.circuits.Circuit", partial(Circuit, first_open_s=600.0, max_open_s=600.0))


@pytest.mark.usefixtures("long_open")
@pytest.mark.parametrize("error", [CUT, CorruptBlockError("a block's checksum differs")])
async def test_a_cut_link_costs_two_requests_a_retry_and_then_no_more(
    error: KVRelayError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with ends(num_prefill=2) as cluster:
        first, second = cluster.prefill
        cut(first, error)
        assert await answers(cluster, 6) == [1, 1, 0, 0, 0, 0]
        assert (len(first.requests), len(second.requests)) == (2, 6)
        assert len(cluster.decode[0].requests) == 6  # each retry under the reservation it had
        assert cluster.metric(OPEN) == 1
        lines = [line for line in caplog.messages if "asked last for now" in line]
        assert lines == [
            f"the link between prefill-node {first.address} and decode-node {cluster.decode[0].address} failed again "
            f"and is asked last for now: {error.message}"
        ]


@pytest.mark.usefixtures("long_open")
async def test_the_nodes_at_the_ends_of_a_cut_link_go_on_with_others() -> None:
    """One prefill node, so each request whose link fails goes to the other decode node, and then all go there."""
    async with ends(num_prefill=1, num_decode=2) as cluster:
        prefill, (first, second) = cluster.prefill[0], cluster.decode
        await answers(cluster, 1)
        assert (len(first.requests), len(second.requests)) == (1, 0)
        cut(prefill, times=2)
        assert await answers(cluster, 3) == [2, 0, 0]
        assert len(second.requests) == 3
        assert len(prefill.requests) == 1 + 2 + 3


@pytest.mark.usefixtures("long_open")
async def test_a_prefill_node_that_fails_by_itself_is_passed_over_whatever_the_decode_node() -> None:
    async with ends(num_prefill=2, num_decode=2) as cluster:
        cut(cluster.prefill[0], UnavailableError("out of order"))
        assert await answers(cluster, 6) == [1, 1, 0, 0, 0, 0]


@pytest.mark.usefixtures("long_open")
async def test_a_decode_node_that_fails_is_passed_over() -> None:
    async with ends(num_decode=2) as cluster:
        cluster.decode[0].at["decode"].failures = [UnavailableError("out of order")] * 50
        assert await answers(cluster, 6) == [1, 1, 0, 0, 0, 0]
        assert cluster.metric(OPEN) == 1


@pytest.mark.parametrize("stage", ["reserve", "granted", "decode", "token"])
async def test_a_trial_whose_client_leaves_is_the_next_requests(stage: str) -> None:
    async with ends(num_decode=2) as cluster:
        node = await on_trial(cluster)
        node.at[stage].hold()
        reached, granted = node.reached[stage], node.reached["granted"]
        asked = asyncio.create_task(cluster.ask())
        await node.until_reached(stage, reached + 1)
        asked.cancel()
        await asyncio.wait([asked])
        async with asyncio.timeout(TIMEOUT_S):
            while cluster.app.door.num_open:  # the coordinator has not heard of it yet
                await asyncio.sleep(0.01)
        node.at[stage].let_go()
        if stage == "reserve":  # it comes late and is given back; until then the node seems busy for a moment
            await node.until_reached("granted", granted + 1)
        await cluster.check_idle()
        await check_is_tried(cluster, node)


async def test_a_trial_that_is_refused_as_busy_is_the_next_requests() -> None:
    async with ends(num_decode=2) as cluster:
        node = await on_trial(cluster)
        node.at["reserve"].failures = [OverloadedError("full")]
        assert await answers(cluster, 1) == [0]
        await check_is_tried(cluster, node)


async def on_trial(cluster: Ends) -> FakeDecodeNode:
    """A decode node that failed twice, and which the next request tries."""
    node = cluster.decode[0]
    node.at["decode"].failures = [UnavailableError("out of order")] * 2
    await answers(cluster, 2)
    known = cluster.app.door.models.find("").cluster
    assert known.suspects()
    async with asyncio.timeout(TIMEOUT_S):
        while known.suspects():
            await asyncio.sleep(0.01)
    return node


async def until_known_idle(cluster: Ends, node: FakeDecodeNode) -> None:
    """What the coordinator knows of the node is as old as its last status, and what seems busy is not asked first."""
    members = [one for one in cluster.app.door.models.members if one.info.address == node.address]
    async with asyncio.timeout(TIMEOUT_S):
        while any(one.load.assigned or one.status.blocks != node.blocks() for one in members):
            await asyncio.sleep(0.01)


async def check_is_tried(cluster: Ends, node: FakeDecodeNode) -> None:
    await until_known_idle(cluster, node)
    num_before = len(node.requests)
    assert await answers(cluster, 1) == [0]
    assert len(node.requests) == num_before + 1
    assert cluster.metric(OPEN) == 0


async def test_one_transient_error_condemns_nobody() -> None:
    async with ends(num_prefill=2) as cluster:
        first = cluster.prefill[0]
        for _ in range(3):
            cut(first, times=1)
            assert await answers(cluster, 2) == [1, 0]
        assert len(first.requests) == 6
        assert cluster.metric(OPEN) == 0


async def test_the_only_way_is_taken_though_its_circuit_is_open() -> None:
    async with ends() as cluster:
        cut(cluster.prefill[0], times=2)
        assert await answers(cluster, 2) == [2, 0]


async def test_answers_that_are_bad_by_themselves_count_against_no_node() -> None:
    async with ends(num_decode=2) as cluster:
        cluster.decode[0].at["token"].failures = [BadLogitsError("logits are NaN")] * 3
        for _ in range(3):
            with pytest.raises(BadLogitsError):
                await cluster.ask()
        assert cluster.metric(OPEN) == 0
        assert await answers(cluster, 1) == [0]
        assert cluster.decode[1].requests == []


async def test_a_new_process_at_the_same_address_starts_with_a_clean_name() -> None:
    """Two requests run on the old one when it is replaced: what they hear then counts against nobody."""
    async with ends(num_decode=2) as cluster:
        cluster.decode[0].at["token"].hold()
        cluster.decode[1].ready = False
        cluster.decode[1].tell()
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 2)
        running = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=5))) for _ in range(2)]
        await cluster.decode[0].until_reached("token", 2)
        cluster.decode[1].ready = True
        cluster.decode[1].tell()
        cluster.decode[0].instance_id = InstanceId("decode-1-again")
        await cluster.decode[0].join_again()
        for asked in running:
            assert (await asked).token_ids == ANSWER_IDS[:5]
        assert len(cluster.decode[1].requests) == 2
        assert cluster.metric(OPEN) == 0
        cluster.decode[0].at["token"].let_go()
