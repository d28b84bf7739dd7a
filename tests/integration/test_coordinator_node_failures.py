"""A coordinator whose fake nodes fail or die over real gRPC: the client sees time, or one clear error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvrelay.errors import (
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.inference import Usage
from kvrelay.types import CachedTokens
from tests.support.coordinator_ends import TIMEOUT_S, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS


@pytest.fixture
def long_verdict_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which the decode node's word comes by itself, though not always within a tenth of a second."""
    monkeypatch.setattr("coordinator.attempt.VERDICT_WAIT_S", TIMEOUT_S)


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


@pytest.mark.usefixtures("long_verdict_wait")
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


@pytest.mark.usefixtures("long_verdict_wait")
async def test_lost_word_of_a_commit_is_no_failure() -> None:
    """The KV stream broke between END and its answer: the prefill node cannot know, the tokens tell."""
    async with ends(num_prefill=2) as cluster:
        cluster.prefill[0].cached = CachedTokens(device=80)
        cluster.prefill[0].at["committed"].failures = [UnavailableError("the KV stream broke")]
        outcome = await cluster.ask()
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 0
        assert outcome.finished.usage == Usage(100, 45, CachedTokens(device=80))
        assert outcome.finished.prefill_node == cluster.prefill[0].address
        assert cluster.prefill[1].requests == []
        assert cluster.metric("kvrelay_cached_prompt_tokens_total", tier="device") == 80


async def test_a_retry_that_finds_the_kv_there_already_is_done() -> None:
    """The first token is slow to come, so the prefill is repeated; what the first node found in its cache counts."""
    async with ends(num_prefill=2) as cluster:
        cluster.prefill[0].cached = CachedTokens(device=80)
        cluster.prefill[1].cached = CachedTokens(memory=48)
        cluster.prefill[0].at["committed"].failures = [UnavailableError("the KV stream broke")]
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.prefill[1].until_reached("compute")
        await cluster.prefill[1].until(lambda: cluster.prefill[1].idle)
        cluster.decode[0].at["token"].let_go()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert len(cluster.decode[0].requests) == 1
        assert outcome.finished.usage == Usage(100, 45, CachedTokens(device=80))
        assert outcome.finished.prefill_node == cluster.prefill[0].address
        assert cluster.metric("kvrelay_retries_total", kind="decode") == 0


async def test_a_retry_that_finds_no_free_node_waits_for_what_the_first_one_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KV is committed, though the first node's word of that was lost: the reservation must not be given up."""
    async with ends(num_prefill=2) as cluster:
        first, second = cluster.prefill
        first.at["committed"].failures = [UnavailableError("the KV stream broke")]
        second.at["start"].failures = [OverloadedError("another one was faster")]
        second.at["start"].hold()
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await second.until_reached("start")
        first.ready = False
        first.tell()
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 2)
        monkeypatch.setattr("coordinator.attempt.VERDICT_WAIT_S", TIMEOUT_S)
        second.at["start"].let_go()
        await second.until(lambda: second.idle)
        for _ in range(5):  # so that the coordinator has heard of it
            await cluster.client.status()
        cluster.decode[0].at["token"].let_go()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert len(cluster.decode[0].requests) == 1
        assert len(second.requests) == 1


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
        await cluster.decode[0].until_reached("decode")  # else the fake keeps its reservation: it has no leases
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
    async with ends(num_decode=2, member_timeout_s=2.0) as cluster:
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
    async with ends(no_node_wait_s=0.3) as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("token")
        await cluster.decode[0].stop()
        with pytest.raises(UnavailableError):
            await asked


async def test_decode_node_that_does_not_answer_a_reserve_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.nodes.RESERVE_TIMEOUT_S", 1.0)
    async with ends(num_decode=2) as cluster:
        silent, other = cluster.decode
        silent.at["reserve"].hold()
        outcome = await cluster.ask()
        assert silent.reached["reserve"] == 1
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.decode_node == other.address
        silent.at["reserve"].let_go()


@pytest.mark.parametrize("max_tokens", [100, 21], ids=["many left", "one left"])
async def test_answer_that_outgrew_every_prefill_node_is_resumed_by_a_decode_node_alone(max_tokens: int) -> None:
    """100 tokens of prompt fit into 7 blocks of 16; with the 20 that were generated they do not."""
    async with ends(num_decode=2) as cluster:
        cluster.prefill[0].num_blocks = 7
        cluster.prefill[0].tell()
        await cluster.until_status(lambda status: status.nodes[0].status.blocks.total == 7)
        cluster.decode[0].at["token"].failures = [*[None] * 20, UnavailableError("dying")]
        outcome = await cluster.ask(sampling=greedy(max_tokens=max_tokens))
        assert outcome.token_ids == ANSWER_IDS[:max_tokens]
        assert outcome.finished.retries == 1
        assert len(cluster.prefill[0].requests) == 1
