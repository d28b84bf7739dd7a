"""Two coordinators, the same fake nodes, no shared state: each serves, neither needs the other."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.cluster import ClusterStatus
from kvrelay.errors import KVRelayError, OverloadedError
from tests.support.coordinator_ends import TIMEOUT_S, Ends, greedy, several_ends
from tests.support.fake_nodes import ANSWER_IDS


async def test_both_serve_requests_of_the_same_id_at_once() -> None:
    async with several_ends(2) as (first, second):
        answers = await asyncio.gather(*(one.ask(request_id="mine") for one in (first, second)))
        assert [answer.token_ids for answer in answers] == [ANSWER_IDS] * 2


async def test_room_that_the_others_request_took_is_waited_for() -> None:
    async with several_ends(2, blocks=10) as (first, second):  # one request of 9 blocks at a time
        node = first.decode[0]
        node.at["token"].hold()
        early = asyncio.create_task(first.ask(sampling=greedy(max_tokens=40)))
        await node.until_reached("token")
        late = asyncio.create_task(second.ask(sampling=greedy(max_tokens=40)))
        await second.until_queued(1)
        node.at["token"].let_go()
        assert [(await asked).token_ids for asked in (early, late)] == [ANSWER_IDS[:40]] * 2
        assert node.max_reserved == 9


@pytest.mark.parametrize("num_each", [8])
async def test_many_at_once_share_a_node_too_small_for_all(num_each: int) -> None:
    async with several_ends(2, blocks=20) as (first, second):
        asking = [one.ask(sampling=greedy(max_tokens=40)) for one in (first, second) for _ in range(num_each)]
        answers = await asyncio.gather(*asking)
        assert [answer.token_ids for answer in answers] == [ANSWER_IDS[:40]] * 2 * num_each
        assert all(answer.finished.retries == 0 for answer in answers)
        assert first.decode[0].max_reserved <= 20


async def test_a_prefill_slot_that_the_others_request_took_is_waited_for() -> None:
    """Nothing tells of a change afterwards: no decode node takes part, and the slot is free again in the status that
    came before the refusal was heard."""
    async with several_ends(2) as (_, second):
        node = second.prefill[0]
        node.at["start"].failures = [OverloadedError("another one was faster")]
        node.at["start"].hold()
        asked = asyncio.create_task(second.ask(sampling=greedy(max_tokens=1)))
        await node.until_reached("start")
        for _ in range(2):
            await until_it_reports(second)
        node.at["start"].let_go()
        answer = await asked
        assert answer.token_ids == ANSWER_IDS[:1]
        assert answer.finished.retries == 0


async def until_it_reports(cluster: Ends) -> None:
    """Returns once the coordinator has heard from every node again."""
    now = asyncio.get_running_loop().time
    began = now()

    def all_since(status: ClusterStatus) -> bool:
        return all(now() - report.age_s > began for report in status.nodes)

    await cluster.until_status(all_since)


async def test_one_that_ends_leaves_the_others_requests_alone() -> None:
    async with several_ends(2, num_decode=2) as (first, second):
        for node in first.decode:
            node.at["token"].hold()
        theirs, ours = (asyncio.create_task(one.ask()) for one in (first, second))
        async with asyncio.timeout(TIMEOUT_S):
            while sum(node.reached["token"] for node in first.decode) < 2:
                await asyncio.sleep(0.01)
        await first.app.close()
        with pytest.raises(KVRelayError):
            await theirs
        for node in second.decode:
            node.at["token"].let_go()
        assert (await ours).token_ids == ANSWER_IDS
        assert (await second.ask()).token_ids == ANSWER_IDS
