"""A coordinator with fake nodes over real gRPC: what a client sees when all goes well, and when something does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.client import Client
from kvrelay.errors import (
    CancelledError,
    DeadlineError,
    DuplicateRequestError,
    KVRelayError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.types import (
    CachedTokens,
    FinishReason,
    RequestAccepted,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    TokensGenerated,
    Usage,
)
from tests.support.coordinator_ends import ends, greedy, long_prompt
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT


async def test_whole_path() -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(device=16, memory=32)
        outcome = await cluster.ask()
        assert outcome.text == ANSWER_TEXT
        assert outcome.token_ids == ANSWER_IDS
        finished = outcome.finished
        assert finished.reason is FinishReason.STOP
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (100, 45)
        assert finished.usage.cached == CachedTokens(device=16, memory=32)
        assert finished.prefill_node == cluster.prefill[0].address
        assert finished.decode_node == cluster.decode[0].address
        assert (finished.handoff_bytes, finished.retries) == (4096, 0)
        assert finished.timing.prefill_s == 0.5
        assert 0 < finished.timing.first_token_s <= finished.timing.total_s


async def test_short_tail_is_computed_by_the_decode_node() -> None:
    async with ends() as cluster:
        cluster.decode[0].num_cached_blocks = 6  # 96 of 100 tokens
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.usage.cached == CachedTokens(device=96)
        assert (outcome.finished.prefill_node, outcome.finished.handoff_bytes) == ("", 0)
        assert outcome.finished.timing.prefill_s == 0.25
        assert cluster.prefill[0].requests == []


async def test_wholly_cached_prompt_needs_no_prefill_node_even_when_all_are_busy() -> None:
    async with ends() as cluster:
        await cluster.ask()  # so that the coordinator expects the prefix there
        cluster.prefill[0].num_slots_free = 0
        cluster.prefill[0].tell()
        cluster.decode[0].num_cached_blocks = 6
        await cluster.ask()
        assert len(cluster.prefill[0].requests) == 1


async def test_one_token_needs_no_reservation() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(max_tokens=1))
        assert outcome.token_ids == ANSWER_IDS[:1]
        assert outcome.text == "T"
        assert outcome.finished.reason is FinishReason.LENGTH
        assert outcome.finished.decode_node == ""
        assert cluster.prefill[0].targets == [None]
        assert cluster.decode[0].requests == []


async def test_nodes_get_ids_seed_and_no_stop_strings() -> None:
    async with ends() as cluster:
        await cluster.ask(TokenPrompt(tuple(range(3, 100))), greedy(stop=("zzz",), seed=7), request_id="mine")
        [request] = cluster.decode[0].requests
        assert request == cluster.prefill[0].requests[0]
        assert request.token_ids == tuple(range(3, 100))
        assert request.num_prompt_tokens == 97
        assert (request.sampling.seed, request.sampling.max_tokens, request.sampling.stop) == (7, 100, ())
        assert request.request_id.startswith("mine#")


async def test_unset_seed_and_max_tokens_are_settled_and_reported() -> None:
    async with ends(default_max_tokens=20) as cluster:
        events = [event async for event in cluster.client.generate(long_prompt(), SamplingParams())]
        accepted = events[0]
        assert isinstance(accepted, RequestAccepted)
        assert accepted.max_tokens == 20
        assert cluster.decode[0].requests[0].sampling.seed == accepted.seed


async def test_stop_string_over_several_tokens_ends_the_answer() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(stop=("never", " 42,")))
        assert outcome.text == "The answer is"
        assert outcome.token_ids == ANSWER_IDS[:17]  # up to and including the comma
        assert outcome.finished.reason is FinishReason.STOP
        assert outcome.finished.stop_string == " 42,"
        assert outcome.finished.usage.completion_tokens == 17


async def test_stop_string_is_not_looked_for_before_min_tokens() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(stop=("e",), min_tokens=10))
        assert outcome.text == "The answer is 42, what"
        assert outcome.finished.stop_string == "e"


async def test_max_tokens_cut_the_answer() -> None:
    async with ends() as cluster:
        outcome = await cluster.ask(sampling=greedy(max_tokens=3, stop=("e question",)))
        assert outcome.text == "The"  # its "e" was held back until the end
        assert outcome.finished.reason is FinishReason.LENGTH


# When nodes fail


async def test_prefill_node_fails_before_it_starts() -> None:
    async with ends(num_prefill=2) as cluster:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 1
        assert outcome.finished.prefill_node == cluster.prefill[1].address
        [first], [second] = cluster.prefill[0].targets, cluster.prefill[1].targets
        assert first is not None
        assert second == replace(first, attempt=2)
        assert cluster.metric("kvrelay_retries_total", kind="prefill") == 1


async def test_prefill_node_dies_during_the_handoff() -> None:
    async with ends(num_prefill=2) as cluster:
        cluster.prefill[0].at["compute"].hold()
        cluster.prefill[0].cached = CachedTokens(device=80)
        cluster.prefill[1].cached = CachedTokens(memory=48)
        asked = asyncio.create_task(cluster.ask())
        await cluster.prefill[0].until_reached("compute")
        await cluster.prefill[0].kill()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 1
        assert outcome.finished.usage.cached == CachedTokens(memory=48)  # the failed attempt's does not count
        assert len(cluster.decode[0].requests) == 1  # the reservation outlived the prefill node


async def test_prefill_node_dies_between_commit_and_its_report() -> None:
    async with ends() as cluster:
        cluster.prefill[0].at["committed"].hold()
        cluster.decode[0].at["finish"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("finish")
        await cluster.prefill[0].kill()
        cluster.decode[0].at["finish"].let_go()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 0


async def test_two_failed_prefills_cast_doubt_on_the_decode_node() -> None:
    async with ends(num_prefill=2, num_decode=2) as cluster:
        for node in cluster.prefill:
            node.at["compute"].failures = [UnavailableError("decode node unreachable")]
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 2
        assert [len(node.requests) for node in cluster.decode] == [1, 1]


async def test_decode_node_dies_before_the_first_token() -> None:
    async with ends(num_decode=2) as cluster:
        cluster.prefill[0].at["compute"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.prefill[0].until_reached("compute")
        await cluster.decode[0].kill()
        cluster.prefill[0].at["compute"].let_go()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.decode_node == cluster.decode[1].address


async def test_decode_node_dies_in_the_middle_of_the_answer() -> None:
    async with ends(num_decode=2) as cluster:
        cluster.prefill[0].cached = CachedTokens(device=64)
        first, second = cluster.decode
        asked = asyncio.create_task(cluster.ask(sampling=greedy(stop=("question was.",))))
        await first.until_reached("token", 10)
        first.at["token"].hold()
        cluster.prefill[0].cached = CachedTokens(device=112)
        await first.kill()
        outcome = await asked
        assert outcome.text == "The answer is 42, whatever the "
        assert outcome.token_ids == ANSWER_IDS[:44]
        assert outcome.finished.decode_node == second.address
        assert outcome.finished.retries == 1
        assert outcome.finished.usage == Usage(100, 44, CachedTokens(device=64))
        resumed = second.requests[0]
        output = resumed.token_ids[100:]
        assert resumed.num_prompt_tokens == 100
        assert len(output) > 0
        assert output == ANSWER_IDS[: len(output)]
        assert cluster.metric("kvrelay_generation_tokens_total") == 44
        assert cluster.metric("kvrelay_prompt_tokens_total") == 100
        assert cluster.metric("kvrelay_cached_prompt_tokens_total", tier="device") == 64
        assert cluster.metric("kvrelay_retries_total", kind="decode") == 1


async def test_decode_node_dies_after_the_last_token() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["finish"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("finish")
        await cluster.decode[0].kill()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 0


async def test_node_that_falls_silent_is_lost_although_its_calls_are_open() -> None:
    async with ends(num_decode=2, member_timeout_s=0.5) as cluster:
        first, second = cluster.decode
        first.at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await first.until_reached("token")
        await first.fall_silent()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.decode_node == second.address


async def test_retries_end() -> None:
    async with ends(num_decode=1, max_retries=2) as cluster:
        cluster.decode[0].at["decode"].failures = [UnavailableError("no") for _ in range(10)]
        with pytest.raises(UnavailableError, match="no"):
            await cluster.ask()
        assert cluster.decode[0].reached["decode"] == 3


async def test_fault_that_no_retry_helps_is_not_retried() -> None:
    async with ends(num_decode=2) as cluster:
        cluster.decode[0].at["token"].failures = [KVRelayError("logits are NaN")]
        with pytest.raises(KVRelayError, match="NaN"):
            await cluster.ask()
        assert cluster.decode[1].requests == []


async def test_last_decode_node_gone_fails_the_request_in_bounded_time() -> None:
    async with ends(member_timeout_s=0.3) as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("token")
        await cluster.decode[0].stop()
        with pytest.raises(UnavailableError):
            await asked


# When there is no room


async def test_waits_for_room_and_goes_in_order() -> None:
    async with ends(blocks=10) as cluster:  # one request of 9 blocks at a time
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id="first"))]
        await node.until_reached("token")
        for name in ("second", "third"):
            asked.append(asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id=name)))
            await cluster.until_queued(len(asked) - 1)
        node.at["token"].let_go()
        outcomes = await asyncio.gather(*asked)
        assert [outcome.token_ids for outcome in outcomes] == [ANSWER_IDS[:40]] * 3
        assert [request.request_id.partition("#")[0] for request in node.requests] == ["first", "second", "third"]
        assert node.max_reserved == 9
        assert outcomes[2].finished.timing.queue_s > outcomes[0].finished.timing.queue_s


@pytest.mark.parametrize("failure", [UnavailableError("failed to connect"), OverloadedError("full, for a moment")])
async def test_reserve_that_failed_once_is_tried_again_though_no_status_ever_changes(failure: KVRelayError) -> None:
    async with ends() as ours:
        ours.decode[0].at["reserve"].failures = [failure]
        assert (await ours.ask()).token_ids == ANSWER_IDS


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
    async with ends(blocks=10, max_queue_wait_s=0.3) as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))
        await cluster.decode[0].until_reached("token")
        with pytest.raises(OverloadedError, match=r"within 0\.3 s") as refused:
            await cluster.ask(sampling=greedy(max_tokens=40))
        assert refused.value.retry_after_s >= 1.0
        cluster.decode[0].at["token"].let_go()
        await asked


# When someone ends it


@pytest.mark.parametrize("how", ["call", "rpc"])
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("decode", "reserve"),
        ("decode", "granted"),
        ("prefill", "start"),
        ("prefill", "compute"),
        ("decode", "token"),
        ("decode", "finish"),
    ],
)
async def test_cancel_frees_everything(kind: str, stage: str, how: str) -> None:
    async with ends() as cluster:
        node = cluster.prefill[0] if kind == "prefill" else cluster.decode[0]
        node.at[stage].hold()
        asked = asyncio.create_task(cluster.ask(request_id="doomed"))
        await node.until_reached(stage)
        if how == "call":
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        else:
            await cluster.client.cancel("doomed")
            with pytest.raises(CancelledError, match="cancelled"):
                await asked
        node.at[stage].let_go()
        await cluster.check_idle()
        assert cluster.metric("kvrelay_request_edges_total", edge="cancelled") == 1


@pytest.mark.parametrize("how", ["call", "rpc"])
async def test_cancel_while_queued(how: str) -> None:
    async with ends(blocks=10) as cluster:
        cluster.decode[0].at["token"].hold()
        running = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))
        await cluster.decode[0].until_reached("token")
        waiting = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id="doomed"))
        await cluster.until_queued(1)
        if how == "call":
            waiting.cancel()
        else:
            await cluster.client.cancel("doomed")
        with pytest.raises((asyncio.CancelledError, CancelledError)):
            await waiting
        await cluster.until_queued(0)
        cluster.decode[0].at["token"].let_go()
        assert (await running).token_ids == ANSWER_IDS[:40]
        assert len(cluster.decode[0].requests) == 1


async def test_cancel_of_a_request_that_does_not_run() -> None:
    async with ends() as cluster:
        with pytest.raises(NotFoundError, match="'nobody'"):
            await cluster.client.cancel("nobody")


async def test_duplicate_request_id() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask(request_id="twin"))
        await cluster.decode[0].until_reached("token")
        with pytest.raises(DuplicateRequestError, match="'twin'"):
            await cluster.ask(request_id="twin")
        cluster.decode[0].at["token"].let_go()
        await asked
        assert (await cluster.ask(request_id="twin")).token_ids == ANSWER_IDS  # free again


async def test_client_deadline() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        with pytest.raises(DeadlineError):
            await cluster.ask(timeout_s=0.3)
        await cluster.check_idle()


async def test_longest_life_of_a_request() -> None:
    async with ends(request_timeout_s=0.3) as cluster:
        cluster.decode[0].at["token"].hold()
        with pytest.raises(DeadlineError, match=r"longer than 0\.3 s"):
            await cluster.ask()


async def test_drain_lets_running_requests_finish_and_takes_no_more() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("token")
        draining = asyncio.create_task(cluster.app.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="draining"):
            await cluster.ask()
        cluster.decode[0].at["token"].let_go()
        assert (await asked).token_ids == ANSWER_IDS
        await draining


async def test_drain_ends_what_outlives_the_grace_period() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("token")
        await cluster.app.drain(0.1)
        with pytest.raises(UnavailableError, match="shutting down"):
            await asked


async def test_sixteen_at_once() -> None:
    async with ends(num_prefill=2, num_decode=2, blocks=40) as cluster:
        outcomes = await asyncio.gather(*(cluster.ask() for _ in range(16)))
        assert {outcome.token_ids for outcome in outcomes} == {ANSWER_IDS}
        assert all(node.requests for node in cluster.nodes)
        assert cluster.metric("kvrelay_request_success_total", reason="stop") == 16


async def test_blocking_client() -> None:
    def use(address: str) -> tuple[str, bool, str]:
        with Client(address) as client:
            text = "".join(
                event.text for event in client.generate(long_prompt(), greedy()) if isinstance(event, TokensGenerated)
            )
            for event in client.generate(long_prompt(), greedy()):
                if isinstance(event, TokensGenerated):
                    break
            ids = client.tokenize(TextPrompt("hello"))
            return text, client.status().ready, client.detokenize(ids)

    async with ends() as cluster:
        assert await asyncio.to_thread(use, cluster.address) == (ANSWER_TEXT, True, "hello")
        assert (await cluster.client.get_model()).name == "bytes"
