"""Answers that are given again, at both doors of a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.api_keys import new_key
from coordinator.identity import Scope
from kvrelay.client import AsyncClient
from kvrelay.errors import BudgetSpentError, UnavailableError
from kvrelay.inference import TextPrompt
from kvrelay.pb import inference_pb2, inference_pb2_grpc
from tests.support.answers import collect
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy, long_prompt
from tests.support.http_ends import HELLO, http_ends

ROOM: dict[str, Any] = {"response_cache_bytes": 2**20}


def num_computed(cluster: Ends) -> int:
    return len(cluster.prefill[0].requests)


def outcomes(cluster: Ends) -> tuple[float, float]:
    name = "kvrelay_response_cache_lookups_total"
    return cluster.metric(name, outcome="hit"), cluster.metric(name, outcome="miss")


async def test_the_same_request_is_answered_again_without_any_node() -> None:
    async with ends(**ROOM) as cluster:
        first = await cluster.ask(sampling=greedy(), request_id="first")
        assert not first.finished.from_response_cache
        assert cluster.metric("kvrelay_response_cache_bytes") > 2_048
        again = await cluster.ask(sampling=greedy(), request_id="second")
        assert again.finished.from_response_cache
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
        assert again.finished.usage == first.finished.usage
        assert (again.finished.prefill_node, again.finished.decode_node, again.finished.handoff_bytes) == ("", "", 0)
        assert num_computed(cluster) == 1
        assert outcomes(cluster) == (1, 1)


async def test_several_answers_are_told_apart_as_before() -> None:
    async with ends(**ROOM) as cluster:
        events = [
            [event async for event in cluster.client.generate(long_prompt(), greedy(max_tokens=3), n=2)]
            for _ in range(2)
        ]
        assert [len([one for one in each if getattr(one, "completion_tokens", 0)]) for each in events] == [2, 2]
        assert num_computed(cluster) == 2


async def test_it_is_off_unless_it_has_room() -> None:
    async with ends() as cluster:
        answers = [await cluster.ask(sampling=greedy(max_tokens=2)) for _ in range(2)]
        assert [answer.finished.from_response_cache for answer in answers] == [False, False]
        assert outcomes(cluster) == (0, 0)


async def test_what_draws_at_random_is_computed_each_time() -> None:
    async with ends(**ROOM) as cluster:
        for _ in range(2):
            answer = await cluster.ask(sampling=greedy(max_tokens=2, temperature=1.0, seed=1))
            assert not answer.finished.from_response_cache
        assert outcomes(cluster) == (0, 0)


async def test_an_answer_that_was_left_or_failed_is_no_answer() -> None:
    async with ends(**ROOM, max_retries=0) as cluster:
        cluster.decode[0].at["token"].failures.append(UnavailableError("on fire"))
        with pytest.raises(UnavailableError):
            await cluster.ask(sampling=greedy())
        async for event in cluster.client.generate(long_prompt(), greedy()):
            if getattr(event, "tokens", ()):
                break
        await cluster.check_idle()
        assert not (await cluster.ask(sampling=greedy())).finished.from_response_cache


async def test_a_tenant_gets_none_of_anothers(tmp_path: Path) -> None:
    infer = frozenset(Scope)
    (acme, acme_line), (umbrella, umbrella_line) = new_key("acme", "a", infer), new_key("umbrella", "u", infer)
    (tmp_path / "keys.toml").write_text(f"{acme_line}\n{umbrella_line}")
    keys = {"api_keys_file": str(tmp_path / "keys.toml"), "cluster_port": 0, "api_key": acme}
    async with ends(**ROOM, **keys) as cluster, AsyncClient(cluster.address, api_key=umbrella) as other:
        for client, is_cached in ((cluster.client, False), (other, False), (other, True), (cluster.client, True)):
            answer = await collect(client.generate(long_prompt(), greedy(max_tokens=2), public_cache="docs"))
            assert answer.finished.from_response_cache is is_cached


async def test_an_answer_that_is_given_again_is_paid_for_again() -> None:
    """4 tokens of the prompt and 2 of the answer, of 12 a day."""
    async with ends(**ROOM, tenants="default:daily_tokens=12") as cluster:
        for is_cached in (False, True):
            answer = await cluster.ask(TextPrompt("abcd"), greedy(max_tokens=2))
            assert answer.finished.from_response_cache is is_cached
        with pytest.raises(BudgetSpentError):
            await cluster.ask(TextPrompt("abcd"), greedy(max_tokens=2))


async def test_the_mark_is_in_the_calls_metadata() -> None:
    async with ends(**ROOM) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        request = inference_pb2.GenerateRequest(text="hello")
        request.sampling.temperature, request.sampling.max_tokens = 0.0, 2
        marks = []
        for _ in range(2):
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIMEOUT_S)
            assert [event async for event in call][-1].HasField("finished")
            marks.append(dict(await call.initial_metadata()).get("x-kvrelay-cache"))
        assert marks == [None, "hit"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_mark_is_in_the_headers_of_http(stream: bool) -> None:
    async with http_ends(**ROOM) as http:
        body = {**HELLO, "temperature": 0, "stream": stream}
        replies = [await http.post("/v1/chat/completions", body) for _ in range(2)]
        assert [reply.headers.get("x-kvrelay-cache") for reply in replies] == [None, "hit"]
