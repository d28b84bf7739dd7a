"""Requests with keep_s over real gRPC with fake nodes: sent again under its id, a request goes on where it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.identity import Context, Identity
from coordinator.tenants import Tenant
from kvrelay.errors import (
    CancelledError,
    DeadlineError,
    DuplicateRequestError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.inference import GenerateEvent, GenerateRequest, RequestAccepted, RequestFinished, TokensGenerated
from kvrelay.rpc.coordinator import CoordinatorClient
from kvrelay.sampling import SamplingParams
from kvrelay.types import RequestId
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy, long_prompt
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT, FakeDecodeNode

KEEP_S = 60.0  # longer than any test


def request(**changes: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"prompt": long_prompt(), "sampling": greedy(), "request_id": "mine", "keep_s": KEEP_S, **changes}
    )


@asynccontextmanager
async def connected(cluster: Ends) -> AsyncIterator[CoordinatorClient]:
    """One that just drops its calls, as a client that dies."""
    client = CoordinatorClient(cluster.address)
    try:
        yield client
    finally:
        await client.close()


async def read_some(client: CoordinatorClient, sent: GenerateRequest, num_tokens: int) -> None:
    """Drops the call after so many tokens."""
    async with asyncio.timeout(TIMEOUT_S), client.generate(sent, None) as events:
        seen = 0
        async for event in events:
            seen += len(event.tokens) if isinstance(event, TokensGenerated) else 0
            if seen >= num_tokens:
                return


async def read_all(client: CoordinatorClient, sent: GenerateRequest) -> list[GenerateEvent]:
    async with asyncio.timeout(TIMEOUT_S), client.generate(sent, None) as events:
        return [event async for event in events]


def token_ids(events: list[GenerateEvent], index: int = 0) -> tuple[int, ...]:
    mine = (event for event in events if isinstance(event, TokensGenerated) and event.index == index)
    return tuple(token.token_id for event in mine for token in event.tokens)


async def until_some_tokens(node: FakeDecodeNode, num_tokens: int) -> None:
    """Holds it once it has given a few."""
    async with asyncio.timeout(TIMEOUT_S):
        await node.until_reached("token", num_tokens + 1)
    node.at["token"].hold()


async def until_detached(cluster: Ends) -> None:
    """The coordinator knows that the call is over: it cancels nothing, so nothing else shows."""
    async with asyncio.timeout(TIMEOUT_S):
        while cluster.app.door._kept._answers[RequestId("mine")].num_readers:
            await asyncio.sleep(0)


async def test_a_client_that_was_cut_off_goes_on_with_its_request() -> None:
    async with ends() as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        reading = asyncio.create_task(read_some(client, request(), 4))
        await until_some_tokens(node, 4)
        await reading
        await until_detached(cluster)
        assert (await cluster.client.status()).num_running == 1
        again = asyncio.create_task(read_all(client, request()))
        node.at["token"].let_go()
        accepted, *_, finished = events = await again
        assert isinstance(accepted, RequestAccepted)
        assert isinstance(finished, RequestFinished)
        assert token_ids(events) == ANSWER_IDS
        assert "".join(event.text for event in events if isinstance(event, TokensGenerated)) == ANSWER_TEXT
        assert len(node.requests) == 1
        assert cluster.metric("kvrelay_attached_total") == 1
        assert cluster.metric("kvrelay_request_edges_total", edge="accepted") == 1
        assert cluster.metric("kvrelay_generation_tokens_total") == len(ANSWER_IDS)


async def test_an_answer_that_has_ended_is_read_again_and_with_what_was_settled() -> None:
    async with ends() as cluster, connected(cluster) as client:
        sent = request(sampling=SamplingParams(max_tokens=100))
        first = await read_all(client, sent)
        accepted = first[0]
        assert isinstance(accepted, RequestAccepted)
        again = await read_all(client, sent)
        settled = await read_all(client, request(sampling=SamplingParams(seed=accepted.seed, max_tokens=100)))
        for events in (again, settled):
            assert (events[0], events[-1]) == (first[0], first[-1])
            assert token_ids(events) == ANSWER_IDS
        assert len(cluster.decode[0].requests) == 1
        assert cluster.metric("kvrelay_request_success_total", reason="stop") == 1
        assert cluster.metric("kvrelay_kept_bytes") == 2_048 + 45 * 4 + 44  # tokens and characters of the answer


async def test_two_read_at_once_and_neither_is_in_the_others_way() -> None:
    async with ends() as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        node.at["token"].hold()
        readers = [asyncio.create_task(read_all(client, request())) for _ in range(2)]
        await node.until_reached("token")
        readers.append(asyncio.create_task(read_some(client, request(), 1)))
        node.at["token"].let_go()
        first, second, _ = await asyncio.gather(*readers)
        assert first is not None
        assert second is not None
        assert token_ids(first) == token_ids(second) == ANSWER_IDS
        assert len(node.requests) == 1


async def test_each_of_several_answers_is_whole() -> None:
    async with ends(num_decode=2) as cluster, connected(cluster) as client:
        await read_some(client, request(n=3), 5)
        events = await read_all(client, request(n=3))
        assert [token_ids(events, index) for index in range(3)] == [ANSWER_IDS] * 3
        assert isinstance(events[-1], RequestFinished)
        assert events[-1].usage.completion_tokens == 3 * len(ANSWER_IDS)


async def test_the_same_request_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are on their way into the queue when the first one gets there."""
    async with ends() as cluster, connected(cluster) as client:
        arrived, tokenized = 0, asyncio.Event()

        async def prompt_ids(*_: object) -> tuple[int, ...]:
            nonlocal arrived
            arrived += 1
            if arrived == 2:
                tokenized.set()
            await tokenized.wait()
            return (3,) * 100

        monkeypatch.setattr(cluster.app.door.models.find("").text, "prompt_ids", prompt_ids)
        both = await asyncio.gather(*(read_all(client, request()) for _ in range(2)))
        assert [token_ids(events) for events in both] == [ANSWER_IDS] * 2
        assert len(cluster.decode[0].requests) == 1


class Callers:
    """Whose the next call is."""

    def __init__(self) -> None:
        self.caller = Tenant("acme")

    def identify(self, context: Context) -> Identity:
        return Identity(self.caller)


@pytest.mark.parametrize("keep_s", [0.0, KEEP_S])
async def test_another_tenant_can_neither_read_nor_end_it_and_learns_nothing(keep_s: float) -> None:
    callers = Callers()
    async with ends(identify=callers.identify) as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = asyncio.create_task(read_all(client, request(keep_s=keep_s)))
        await node.until_reached("token")
        callers.caller = Tenant("umbrella")
        with pytest.raises(DuplicateRequestError) as theirs:
            await read_all(client, request())
        with pytest.raises(NotFoundError, match=r"^no request with the id 'mine' is running$"):
            await cluster.client.cancel("mine")
        with pytest.raises(NotFoundError, match=r"^no request with the id 'mine' runs or ended lately$"):
            await cluster.client.explain("mine")
        callers.caller = Tenant("acme")
        with pytest.raises(DuplicateRequestError) as own:
            await read_all(client, request(sampling=greedy(max_tokens=3)))
        assert own.value.message == theirs.value.message
        assert "acme" not in theirs.value.message
        node.at["token"].let_go()
        assert token_ids(await asked) == ANSWER_IDS


async def test_another_content_under_the_id_is_refused_and_the_first_goes_on() -> None:
    async with ends() as cluster, connected(cluster) as client:
        await read_all(client, request())
        said = re.escape("this is not the same one sent again with keep_s; choose another id")
        with pytest.raises(DuplicateRequestError, match=said):
            await read_all(client, request(sampling=greedy(max_tokens=3)))
        with pytest.raises(DuplicateRequestError, match=said):
            await read_all(client, request(keep_s=0.0))
        assert token_ids(await read_all(client, request())) == ANSWER_IDS


@pytest.mark.parametrize("attached", [False, True])
async def test_cancel_ends_it_for_all(attached: bool) -> None:
    async with ends() as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        reading = asyncio.create_task(read_some(client, request(), 2))
        await until_some_tokens(node, 2)
        await reading
        others = [asyncio.create_task(read_all(client, request())) for _ in range(2)] if attached else []
        if attached:
            async with asyncio.timeout(TIMEOUT_S):
                while cluster.metric("kvrelay_attached_total") < 2:
                    await asyncio.sleep(0)
        await cluster.client.cancel("mine")
        await cluster.check_idle()
        node.at["token"].let_go()
        for events in (*[await other for other in others], await read_all(client, request())):
            assert token_ids(events) == ANSWER_IDS[: len(token_ids(events))]
            assert getattr(events[-1], "message", "") == "the request was cancelled"
        await cluster.client.cancel("mine")  # forgets what was kept of it
        assert token_ids(await read_all(client, request())) == ANSWER_IDS


async def test_what_nobody_comes_back_for_is_ended_after_its_time() -> None:
    async with ends() as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        reading = asyncio.create_task(read_some(client, request(keep_s=0.2), 2))
        await until_some_tokens(node, 2)
        await reading
        await cluster.check_idle()
        node.at["token"].let_go()
        assert cluster.metric("kvrelay_request_edges_total", edge="cancelled") == 1
        assert cluster.metric("kvrelay_kept_bytes") == 0
        explained = await cluster.client.explain("mine")
        assert explained.error is not None
        assert explained.error.message == "nobody came back for the answer within 0.2 s"
        assert token_ids(await read_all(client, request())) == ANSWER_IDS  # anew


async def test_a_failure_that_may_be_tried_again_is_tried_again() -> None:
    async with ends(max_retries=0) as cluster, connected(cluster) as client:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        *_, failed = await read_all(client, request())
        assert getattr(failed, "message", "") == "out of order"
        assert token_ids(await read_all(client, request())) == ANSWER_IDS


async def test_reading_again_needs_neither_room_nor_nodes_nor_an_open_door() -> None:
    async with ends() as cluster, connected(cluster) as client:
        await read_all(client, request())
        cluster.decode[0].ready = False
        cluster.decode[0].tell()
        await cluster.until_status(lambda status: not status.ready)
        assert token_ids(await read_all(client, request())) == ANSWER_IDS
        async with asyncio.timeout(TIMEOUT_S):
            await cluster.app.drain(1_000.0)  # what is kept does not hold it up
        assert token_ids(await read_all(client, request())) == ANSWER_IDS


async def test_a_drain_waits_for_what_is_computed_and_its_client_may_come_back_meanwhile() -> None:
    async with ends() as cluster, connected(cluster) as client:
        node = cluster.decode[0]
        reading = asyncio.create_task(read_some(client, request(), 2))
        await until_some_tokens(node, 2)
        await reading
        draining = asyncio.create_task(cluster.app.drain(1_000.0))
        await asyncio.sleep(0)
        again = asyncio.create_task(read_all(client, request()))
        node.at["token"].let_go()
        assert token_ids(await again) == ANSWER_IDS
        await draining


async def test_kept_answers_are_bounded_and_the_oldest_go_first() -> None:
    one = 2_048 + 100 * (4 + 12)  # bytes that an answer of up to 100 tokens may take
    async with ends(max_kept_bytes=one + 2_500) as cluster, connected(cluster) as client:
        for name in ("first", "second", "third"):
            await read_all(client, request(request_id=name))
            assert cluster.metric("kvrelay_kept_bytes") <= one + 2_500
        num_requests = len(cluster.decode[0].requests)
        assert token_ids(await read_all(client, request(request_id="third"))) == ANSWER_IDS
        assert len(cluster.decode[0].requests) == num_requests
        await read_all(client, request(request_id="first"))  # computed anew
        assert len(cluster.decode[0].requests) == num_requests + 1
        cluster.decode[0].at["token"].hold()
        running = asyncio.create_task(read_all(client, request(request_id="running")))
        await cluster.until_status(lambda status: status.num_running == 1)
        with pytest.raises(OverloadedError, match="the requests that run with keep_s take all"):
            await read_all(client, request(request_id="too many"))
        cluster.decode[0].at["token"].let_go()
        assert token_ids(await running) == ANSWER_IDS
        with pytest.raises(InvalidRequestError, match="--max-kept-bytes"):
            await read_all(client, request(request_id="too long", sampling=greedy(max_tokens=300)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_s": 601.0}, r"keep_s is 601; allowed is \[0, 600\] seconds"),
        ({"keep_s": -1.0}, r"keep_s is -1; allowed"),
        ({"keep_s": float("nan")}, "keep_s is nan; allowed"),
        ({"request_id": ""}, "keep_s is 60, but the request has no request_id to find its answer by; choose one"),
    ],
)
async def test_what_cannot_be_kept_is_told_so(changes: dict[str, Any], message: str) -> None:
    async with ends() as cluster, connected(cluster) as client:
        with pytest.raises(InvalidRequestError, match=message):
            await read_all(client, request(**changes))


async def test_a_refused_request_is_not_kept() -> None:
    async with ends() as cluster, connected(cluster) as client:
        with pytest.raises(InvalidRequestError):
            await read_all(client, request(sampling=greedy(temperature=3.0)))
        assert cluster.metric("kvrelay_kept_bytes") == 0
        assert token_ids(await read_all(client, request())) == ANSWER_IDS


@pytest.mark.parametrize("how", ["left", "cancelled"])
async def test_a_caller_that_leaves_ends_its_request_whatever_keep_s_is(how: str) -> None:
    async with ends() as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        events = cluster.client.generate(long_prompt(), greedy(), keep_s=KEEP_S)
        assert isinstance(await anext(events), RequestAccepted)
        await node.until_reached("token")
        if how == "left":
            await events.aclose()
        else:
            reading = asyncio.create_task(anext(events))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        await cluster.check_idle()
        node.at["token"].let_go()
        assert cluster.metric("kvrelay_request_edges_total", edge="cancelled") == 1


async def test_a_deadline_is_no_farewell() -> None:
    """Who has no more time may come back with more."""
    async with ends() as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        with pytest.raises(DeadlineError):
            await cluster.ask(request_id="mine", keep_s=KEEP_S, timeout_s=0.3)
        node.at["token"].let_go()
        assert (await cluster.ask(request_id="mine", keep_s=KEEP_S)).token_ids == ANSWER_IDS
        assert len(node.requests) == 1


async def test_a_cancelled_answer_is_told_as_cancelled_to_who_comes_back() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(cluster.ask(request_id="mine", keep_s=KEEP_S))
        await cluster.decode[0].until_reached("token")
        await cluster.client.cancel("mine")
        cluster.decode[0].at["token"].let_go()
        for asking in (asked, cluster.ask(request_id="mine", keep_s=KEEP_S)):
            with pytest.raises(CancelledError, match="the request was cancelled"):
                await asking
