"""What a coordinator tells of a request's life, over real gRPC with fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from kvrelay import explain
from kvrelay.errors import InvalidRequestError, NotFoundError, OverloadedError, UnavailableError
from kvrelay.explanation import Explanation
from kvrelay.types import CachedTokens
from tests.support.coordinator_ends import Ends, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS


def edges(explanation: Explanation) -> list[str]:
    return [step.edge for step in explanation.steps]


def details(explanation: Explanation, edge: str) -> list[str]:
    return [step.detail for step in explanation.steps if step.edge == edge]


def in_order(times: Sequence[float]) -> bool:
    return list(times) == sorted(times)


def tells_choice(line: str, cluster: Ends) -> bool:
    named = cluster.prefill[0].address in line and cluster.decode[0].address in line
    return named and line.endswith(": not measured yet")


async def test_a_finished_request() -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(memory=48)
        answer = await cluster.ask(request_id="mine")
        told = await cluster.client.explain("mine")
        prefill, decode = cluster.prefill[0].address, cluster.decode[0].address
        assert edges(told) == ["accepted", "tried", "prefill_sent", "first_token", "finished"]
        assert [step.detail for step in told.steps] == [
            "100 prompt tokens, 100 to generate at most",
            "",
            f"to {decode}, 0 blocks cached there",
            f"from {decode}",
            "stop",
        ]
        assert in_order([step.at_s for step in told.steps])
        assert (told.request_id, told.tenant, told.model, told.state) == ("mine", "default", "bytes", "finished")
        assert (told.prefill_node, told.decode_node, told.computed_on_decode) == (prefill, decode, False)
        assert (told.num_blocks, told.handoff_bytes, told.retries, told.error) == (13, 4096, 0, None)
        [choice] = told.considered
        assert tells_choice(choice, cluster)
        assert (told.usage, told.timing) == (answer.finished.usage, answer.finished.timing)
        assert told.forecast.actual_ttft_s == answer.finished.timing.first_token_s
        assert 0 < told.forecast.actual_itl_s * (len(ANSWER_IDS) - 1) <= answer.finished.timing.total_s


async def test_a_request_that_waits_says_who_refused_it() -> None:
    async with ends(blocks=10) as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        first = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))
        await node.until_reached("token")
        second = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40), request_id="mine"))
        await cluster.until_queued(1)
        await node.until_reached("reserve", 2)
        await cluster.until_status(lambda _: cluster.metric("kvrelay_request_edges_total", edge="refused") >= 1)
        told = await cluster.client.explain("mine")
        assert (told.state, told.decode_node, told.num_blocks, told.usage.completion_tokens) == ("waiting", "", 0, 0)
        assert edges(told)[:3] == ["accepted", "tried", "refused"]
        assert details(told, "refused")[0] == f"{node.address}: 9 blocks are not to be had now"
        assert told.timing.queue_s == told.timing.total_s > 0
        node.at["token"].let_go()
        await asyncio.gather(first, second)
        assert (await cluster.client.explain("mine")).state == "finished"


async def test_a_request_for_which_no_prefill_node_has_a_slot() -> None:
    async with ends() as cluster:
        cluster.prefill[0].num_slots_free = 0
        cluster.prefill[0].tell()
        await cluster.until_status(lambda status: min(one.status.num_slots_free for one in status.nodes) == 0)
        asked = asyncio.create_task(cluster.ask(request_id="mine"))
        await cluster.until_status(lambda _: cluster.metric("kvrelay_request_edges_total", edge="refused") >= 1)
        assert details(await cluster.client.explain("mine"), "refused")[0] == "no prefill node has a slot"
        cluster.prefill[0].num_slots_free = 4
        cluster.prefill[0].tell()
        assert (await asked).token_ids == ANSWER_IDS


async def test_a_request_that_runs_tells_so_far() -> None:
    async with ends() as cluster:
        cluster.decode[0].num_cached_blocks = 5  # 80 of 100 tokens: a tail
        cluster.decode[0].at["finish"].hold()
        asked = asyncio.create_task(cluster.ask(request_id="mine"))
        await cluster.decode[0].until_reached("finish")
        told = await cluster.client.explain("mine")
        assert (told.state, told.computed_on_decode, told.prefill_node) == ("running", True, "")
        assert edges(told) == ["accepted", "tried", "tail_sent", "first_token"]
        assert details(told, "tail_sent") == [f"to {cluster.decode[0].address}, 5 blocks cached there"]
        assert told.usage.cached == CachedTokens(device=80)
        cluster.decode[0].at["finish"].let_go()
        await asked


async def test_retries_and_a_resume_say_why() -> None:
    async with ends(num_prefill=2, num_decode=2) as cluster:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        cluster.decode[0].at["token"].failures = [None, None, UnavailableError("on fire")]
        assert (await cluster.ask(request_id="mine")).token_ids == ANSWER_IDS
        told = await cluster.client.explain("mine")
        assert edges(told) == [
            "accepted",
            "tried",
            "prefill_sent",
            "prefill_retried",
            "first_token",
            "resumed",
            "tried",
            "prefill_sent",
            "first_token",
            "finished",
        ]
        assert details(told, "prefill_retried") == [f"{cluster.prefill[0].address} failed: out of order"]
        assert details(told, "resumed") == [f"{cluster.decode[0].address} failed: on fire"]
        assert (told.retries, told.decode_node) == (2, cluster.decode[1].address)


async def test_a_failed_and_a_cancelled_request_say_what_ended_them() -> None:
    async with ends(max_retries=0) as cluster:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        with pytest.raises(UnavailableError):
            await cluster.ask(request_id="failed")
        told = await cluster.client.explain("failed")
        assert told.error is not None
        assert (told.state, told.error.code, told.error.message) == ("failed", "unavailable", "out of order")
        assert told.steps[-1].detail == "out of order"

        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask(request_id="left"))
        await cluster.decode[0].until_reached("token")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await cluster.check_idle()
        cluster.decode[0].at["token"].let_go()
        told = await cluster.client.explain("left")
        assert (told.state, told.steps[-1].edge, told.steps[-1].detail) == (
            "cancelled",
            "cancelled",
            "the client went away",
        )


async def test_what_was_refused_at_the_door_or_is_unknown_is_not_found() -> None:
    async with ends() as cluster:
        with pytest.raises(InvalidRequestError):
            await cluster.ask(request_id="refused", sampling=greedy(temperature=3.0))
        for request_id in ("refused", "unknown"):
            with pytest.raises(NotFoundError, match=f"no request with the id '{request_id}' runs or ended lately"):
                await cluster.client.explain(request_id)


async def test_the_command_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        cluster.prefill[0].cached = CachedTokens(memory=48)
        answer = await cluster.ask(request_id="mine")
        argv = ["mine", "--coordinator", f"127.0.0.1:1,{cluster.address}"]
        assert await asyncio.to_thread(explain.main, argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "request mine: finished; tenant default, model bytes"
        assert lines[2] == "  tokens   100 of the prompt (cached: 48 memory), 45 out"
        assert lines[3] == (
            f"  nodes    prefill {cluster.prefill[0].address}, decode {cluster.decode[0].address} (13 blocks), "
            "KV handed over 4.0 KiB, retries 0"
        )
        assert lines[4].startswith("  choice   ")
        assert tells_choice(lines[4], cluster)
        assert lines[6].split() == ["AFTER", "STEP", "DETAIL"]
        assert [line.split()[2] for line in lines[7:]] == [
            "accepted",
            "tried",
            "prefill_sent",
            "first_token",
            "finished",
        ]
        assert await asyncio.to_thread(explain.main, [*argv, "--json"]) == 0
        described = json.loads(capsys.readouterr().out)
        assert described["timing"]["total_s"] == answer.finished.timing.total_s
        assert described["steps"][0]["edge"] == "accepted"
        assert described["usage"]["cached"] == {"device": 0, "memory": 48, "disk": 0}
        assert await asyncio.to_thread(explain.main, ["other", "--coordinator", cluster.address]) == 1
        assert capsys.readouterr().err == (
            f"kvrelay explain: no request with the id 'other' runs or ended lately at {cluster.address}; another "
            "coordinator may have it\n"
        )


async def test_a_wait_that_was_too_long_is_told_with_all_its_tries() -> None:
    async with ends(blocks=10, max_queue_wait_s=0.3) as cluster:
        cluster.decode[0].at["token"].hold()
        first = asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=40)))
        await cluster.decode[0].until_reached("token")
        with pytest.raises(OverloadedError):
            await cluster.ask(sampling=greedy(max_tokens=40), request_id="mine")
        told = await cluster.client.explain("mine")
        assert told.state == "failed"
        assert told.steps[-1].detail == "no node had room for the request within 0.3 s; try again later"
        cluster.decode[0].at["token"].let_go()
        await first
