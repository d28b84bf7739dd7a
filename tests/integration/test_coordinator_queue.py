"""A coordinator whose fake nodes have no room: requests wait in order, bounded in number and time."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.errors import KVRelayError, OverloadedError, UnavailableError
from tests.support.coordinator_ends import TIMEOUT_S, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS


async def test_waits_for_room_and_goes_in_order() -> None:
    async with ends(blocks=10) as cluster:  # one request of 9 blocks at a time
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id="first"))]
        await node.until_reached("token")
        for name in ("second", "third"):
            asked.append(asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id=name)))
            await cluster.until_queued(len(asked) - 1)
        assert cluster.metric("kvrelay_requests_running") == 1
        assert cluster.metric("kvrelay_requests_waiting") == 2
        node.at["token"].let_go()
        outcomes = await asyncio.gather(*asked)
        assert [outcome.token_ids for outcome in outcomes] == [ANSWER_IDS[:40]] * 3
        assert [request.request_id.partition("#")[0] for request in node.requests] == ["first", "second", "third"]
        assert node.max_reserved == 9
        assert outcomes[2].finished.timing.queue_s > outcomes[0].finished.timing.queue_s


@pytest.mark.parametrize("failure", [UnavailableError("failed to connect"), OverloadedError("full, for a moment")])
async def test_reserve_that_failed_once_is_tried_again_though_no_status_ever_changes(failure: KVRelayError) -> None:
    async with ends() as cluster:
        cluster.decode[0].at["reserve"].failures = [failure]
        assert (await cluster.ask()).token_ids == ANSWER_IDS


async def test_waits_for_a_prefill_slot_without_reserving() -> None:
    async with ends() as cluster:
        cluster.prefill[0].num_slots_free = 0
        cluster.prefill[0].tell()
        await cluster.until_status(lambda status: status.nodes[0].status.num_slots_free == 0)
        asked = asyncio.create_task(cluster.ask())
        await cluster.until_queued(1)
        assert cluster.decode[0].reached["reserve"] == 0
        cluster.prefill[0].num_slots_free = 1
        cluster.prefill[0].tell()
        assert (await asked).token_ids == ANSWER_IDS


async def test_a_guess_at_a_cache_that_proves_wrong_leaves_no_reservation_behind() -> None:
    """While every prefill node is busy only a decode node that has the prompt will do. One that was believed to have
    it, and has it no more, gets its blocks back at once."""
    async with ends() as cluster:
        await cluster.ask()  # from now on the decode node is believed to have the prompt
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        prefill.num_slots_free = 0
        prefill.tell()
        await cluster.until_status(lambda status: status.nodes[0].status.num_slots_free == 0)
        asked = asyncio.create_task(cluster.ask())
        await decode.until_reached("granted", times=2)
        await asyncio.wait_for(decode.until(lambda: decode.idle), TIMEOUT_S)
        await cluster.until_queued(1)
        prefill.num_slots_free = 1
        prefill.tell()
        assert (await asked).token_ids == ANSWER_IDS


async def test_prefill_node_that_became_busy_sends_the_request_back_to_the_queue() -> None:
    async with ends() as cluster:
        cluster.prefill[0].at["start"].failures = [OverloadedError("all slots are taken")]
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 0
        assert len(cluster.decode[0].requests) == 2


async def test_full_queue_turns_requests_away_with_advice() -> None:
    async with ends(blocks=10, max_queue=1) as cluster:
        cluster.decode[0].at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))]
        await cluster.decode[0].until_reached("token")
        asked.append(asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40))))
        await cluster.until_queued(1)
        with pytest.raises(OverloadedError, match="wait already") as refused:
            await cluster.ask(sampling=greedy(max_tokens=40))
        assert refused.value.retry_after_s >= 1.0
        assert refused.value.retryable
        cluster.decode[0].at["token"].let_go()
        await asyncio.gather(*asked)


async def test_wait_for_room_is_bounded() -> None:
    async with ends(blocks=10, max_queue_wait_s=2.0) as cluster:  # the first finds room in less
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))
        await cluster.decode[0].until_reached("token")
        with pytest.raises(OverloadedError, match=r"within 2 s") as refused:
            await cluster.ask(sampling=greedy(max_tokens=40))
        assert refused.value.retry_after_s >= 1.0
        cluster.decode[0].at["token"].let_go()
        await asked


async def test_everyone_in_the_queue_hears_soon_that_all_nodes_are_gone() -> None:
    """Not only the head of the queue, which is the only one that tries."""
    async with ends(blocks=10, no_node_wait_s=0.3, member_timeout_s=60.0, max_queue_wait_s=60.0) as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))]
        await node.until_reached("token")
        asked += [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40))) for _ in range(5)]
        await cluster.until_queued(5)
        await node.stop()
        outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), TIMEOUT_S)
        assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 6
