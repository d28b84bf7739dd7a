"""Requests that someone ends, and many at once, over real gRPC with fake nodes: nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.client import Client
from kvrelay.errors import (
    CancelledError,
    DeadlineError,
    DuplicateRequestError,
    NotFoundError,
    UnavailableError,
)
from kvrelay.inference import TextPrompt, TokensGenerated
from tests.support.coordinator_ends import ends, greedy, long_prompt
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT


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
        if stage not in ("reserve", "granted"):  # a Reserve on its way is waited for, to be given back
            await cluster.check_idle()
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


async def test_calls_of_nodes_have_a_deadline_of_their_own() -> None:
    """A node ends them even if neither the coordinator's cancel nor its death gets through."""
    async with ends(request_timeout_s=50.0) as cluster:
        await cluster.ask()
        for node in cluster.nodes:
            [limit_s] = node.time_limits_s
            assert limit_s is not None
            assert 0 < limit_s < 60.0  # grpc rounds up


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


async def test_drain_that_is_hastened_tells_what_still_runs() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await cluster.decode[0].until_reached("token")
        draining = asyncio.create_task(cluster.app.drain(1_000.0))
        await asyncio.sleep(0)
        draining.cancel()
        with pytest.raises(UnavailableError, match="this coordinator is shutting down"):
            await asked


async def test_drain_that_begins_while_a_prompt_is_tokenized_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as cluster:
        tokenizing, tokenized = asyncio.Event(), asyncio.Event()

        async def prompt_ids(*_: object) -> tuple[int, ...]:
            tokenizing.set()
            await tokenized.wait()
            return (3,) * 100

        monkeypatch.setattr(cluster.app.door.models.find("").text, "prompt_ids", prompt_ids)
        asked = asyncio.create_task(cluster.ask())
        await tokenizing.wait()
        await cluster.app.drain(10.0)
        tokenized.set()
        with pytest.raises(UnavailableError, match="draining"):
            await asked
        assert not any(node.requests for node in cluster.nodes)


async def test_sixteen_at_once() -> None:
    async with ends(num_prefill=2, num_decode=2, blocks=40) as cluster:
        outcomes = await asyncio.gather(*(cluster.ask() for _ in range(16)))
        assert {outcome.token_ids for outcome in outcomes} == {ANSWER_IDS}
        assert all(node.requests for node in cluster.nodes)
        assert cluster.metric("kvrelay_request_success_total", reason="stop") == 16
        assert cluster.metric("kvrelay_prompt_tokens_total") == 16 * 100
        assert cluster.metric("kvrelay_generation_tokens_total") == 16 * len(ANSWER_IDS)
        assert cluster.metric("kvrelay_inter_token_latency_seconds_count") == 16 * (len(ANSWER_IDS) - 1)
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert cluster.metric(f"kvrelay_{name}_seconds_count") == 16, name
        seconds = [outcome.finished.timing.total_s for outcome in outcomes]
        assert cluster.metric("kvrelay_e2e_request_latency_seconds_sum") == pytest.approx(sum(seconds))


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
