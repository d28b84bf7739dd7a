"""A client of several coordinators over real gRPC with fake nodes: it goes on where one is left, and gives its caller
every token once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from kvrelay import ask
from kvrelay.client import AnswerEvent, AsyncClient, Client, addresses_of
from kvrelay.errors import (
    AnswerDiffersError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.inference import RequestAccepted, RequestFinished, TextPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams
from tests.support.coordinator_ends import TIMEOUT_S, Ends, greedy, long_prompt, several_ends
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT, FakeDecodeNode
from tests.support.fault_proxy import FaultProxy

NOBODY = "127.0.0.1:1"
DRAWN = SamplingParams(max_tokens=100)  # no seed: the coordinator chooses one


@contextmanager
def link_to(cluster: Ends) -> Any:
    with FaultProxy(int(cluster.address.rpartition(":")[2]), frames=False) as proxy:
        yield proxy


@asynccontextmanager
async def client_of(*addresses: str) -> AsyncIterator[AsyncClient]:
    async with asyncio.timeout(TIMEOUT_S), AsyncClient(addresses) as client:
        yield client


class Reading:
    """One answer, read in the background."""

    def __init__(self, client: AsyncClient, **kwargs: Any) -> None:
        self.seen: list[AnswerEvent] = []
        self._task = asyncio.create_task(self._read(client, {"sampling": DRAWN, **kwargs}))

    async def _read(self, client: AsyncClient, kwargs: dict[str, Any]) -> None:
        async for event in client.generate(long_prompt(), **kwargs):
            self.seen.append(event)

    async def until_tokens(self, node: FakeDecodeNode) -> None:
        """A few have come, and the node gives no more."""
        await node.until_reached("token", 4)
        node.at["token"].hold()
        while not any(isinstance(event, TokensGenerated) for event in self.seen):
            await asyncio.sleep(0.01)

    async def done(self) -> None:
        await self._task

    def check_whole(self) -> None:
        accepted, *tokens, finished = self.seen
        assert isinstance(accepted, RequestAccepted)
        assert isinstance(finished, RequestFinished)
        given = [event for event in tokens if isinstance(event, TokensGenerated)]
        assert tuple(token.token_id for event in given for token in event.tokens) == ANSWER_IDS
        assert "".join(event.text for event in given) == ANSWER_TEXT


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2,a:1", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
    ],
)
def test_addresses(given: str | list[str], found: tuple[str, ...]) -> None:
    assert addresses_of(given) == found


def test_no_address() -> None:
    with pytest.raises(InvalidRequestError, match="names no coordinator; give host:port"):
        addresses_of(" ,")


async def test_every_call_goes_to_one_that_is_there() -> None:
    async with several_ends(1) as (cluster,), client_of(NOBODY, cluster.address) as client:
        assert (await client.status()).ready
        assert [event async for event in client.generate(long_prompt(), greedy(max_tokens=2))]
        assert (await client.get_model()).name == "bytes"
        assert await client.detokenize(await client.tokenize(TextPrompt("hello"))) == "hello"


async def test_one_that_drains_is_passed_over() -> None:
    async with several_ends(2) as (first, second), client_of(first.address, second.address) as client:
        await first.app.drain(10.0)
        reading = Reading(client)
        await reading.done()
        reading.check_whole()
        assert first.metric("kvrelay_errors_total", code="unavailable") == 1
        assert second.metric("kvrelay_request_success_total", reason="stop") == 1
        again = Reading(client)  # who answered last is asked first
        await again.done()
        assert first.metric("kvrelay_errors_total", code="unavailable") == 1


async def test_what_was_turned_away_for_want_of_room_is_told_so() -> None:
    """It was told when to come back to that one, which keeps its place."""
    async with several_ends(2, max_queue=1) as (first, second), client_of(first.address, second.address) as client:
        first.decode[0].at["token"].hold()
        running = [asyncio.create_task(first.ask(sampling=greedy(max_tokens=300)))]
        await first.decode[0].until_reached("token")
        running.append(asyncio.create_task(first.ask(sampling=greedy(max_tokens=300))))
        await first.until_queued(1)
        with pytest.raises(OverloadedError):
            await Reading(client).done()
        first.decode[0].at["token"].let_go()
        await asyncio.gather(*running)


async def test_an_answer_goes_on_when_its_coordinator_is_lost() -> None:
    async with several_ends(2, num_decode=2) as (first, second):
        with link_to(first) as link:
            async with client_of(link.address, second.address) as client:
                reading = Reading(client, request_id="mine")
                one = await holding_the_answer(first)
                await reading.until_tokens(one)
                await asyncio.to_thread(link.cut)
                one.at["token"].let_go()
                await reading.done()
        reading.check_whole()
        accepted = reading.seen[0]
        assert isinstance(accepted, RequestAccepted)
        before, after = (node_request for node in first.decode for node_request in node.requests)
        assert before.sampling == after.sampling
        assert after.sampling.seed == accepted.seed
        assert after.token_ids == before.token_ids  # from the start, not from what the client has
        assert second.metric("kvrelay_request_success_total", reason="stop") == 1
        assert first.metric("kvrelay_request_edges_total", edge="cancelled") == 1


async def holding_the_answer(cluster: Ends) -> FakeDecodeNode:
    """The decode node that was asked, once it is."""
    while True:
        for node in cluster.decode:
            if node.reached["token"]:
                return node
        await asyncio.sleep(0.01)


async def test_an_answer_goes_on_when_its_coordinator_shuts_down() -> None:
    async with several_ends(2) as (first, second), client_of(first.address, second.address) as client:
        reading = Reading(client)
        await reading.until_tokens(first.decode[0])
        await first.app.drain(0.0)
        first.decode[0].at["token"].let_go()
        await reading.done()
        reading.check_whole()
        assert second.metric("kvrelay_request_success_total", reason="stop") == 1


async def test_several_answers_go_on_too() -> None:
    async with several_ends(2) as (first, second), client_of(first.address, second.address) as client:
        reading = Reading(client, n=2, sampling=greedy(max_tokens=10))
        await reading.until_tokens(first.decode[0])
        await first.app.drain(0.0)
        first.decode[0].at["token"].let_go()
        await reading.done()
        for index in range(2):
            mine = [event for event in reading.seen if isinstance(event, TokensGenerated) and event.index == index]
            assert tuple(token.token_id for event in mine for token in event.tokens) == ANSWER_IDS[:10]


async def test_another_answer_is_an_error_and_not_glued_to_the_first() -> None:
    async with several_ends(2) as (first, second), client_of(first.address, second.address) as client:
        reading = Reading(client)
        await reading.until_tokens(first.decode[0])
        for node in first.nodes:
            node.answer_ids = tuple(reversed(ANSWER_IDS))
        await first.app.drain(0.0)
        first.decode[0].at["token"].let_go()
        with pytest.raises(AnswerDiffersError, match="token 0 of answer 0 is 2 and was 54"):
            await reading.done()


@pytest.mark.parametrize("num_coordinators", [1, 2])
async def test_a_request_with_keep_s_goes_on_where_it_was_when_only_the_link_was_lost(num_coordinators: int) -> None:
    """Also where another coordinator might compute it anew."""
    async with several_ends(num_coordinators) as (first, *others):
        with link_to(first) as link:
            async with client_of(link.address, *(other.address for other in others)) as client:
                reading = Reading(client, keep_s=60.0)
                await reading.until_tokens(first.decode[0])
                await asyncio.to_thread(link.reset)
                first.decode[0].at["token"].let_go()
                await reading.done()
        reading.check_whole()
        assert len(first.decode[0].requests) == 1
        assert first.metric("kvrelay_attached_total") == 1


async def test_a_kept_request_whose_coordinator_is_gone_goes_on_elsewhere() -> None:
    async with several_ends(2, num_decode=2) as (first, second):
        with link_to(first) as link:
            async with client_of(link.address, second.address) as client:
                reading = Reading(client, keep_s=0.5)
                one = await holding_the_answer(first)
                await reading.until_tokens(one)
                await asyncio.to_thread(link.cut)
                one.at["token"].let_go()
                await reading.done()
        reading.check_whole()
        assert second.metric("kvrelay_request_success_total", reason="stop") == 1


async def test_without_keep_s_one_alone_is_asked_once() -> None:
    async with several_ends(1) as (cluster,):
        with link_to(cluster) as link:
            async with client_of(link.address) as client:
                reading = Reading(client)
                await reading.until_tokens(cluster.decode[0])
                await asyncio.to_thread(link.reset)
                with pytest.raises(UnavailableError, match=f"{link.address} went away in the middle of the answer"):
                    await reading.done()
                cluster.decode[0].at["token"].let_go()
        assert len(cluster.decode[0].requests) == 1


async def test_who_is_alone_and_lost_is_told_what_broke_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.failover.NUM_ROUNDS", 2)
    async with several_ends(1) as (cluster,):
        with link_to(cluster) as link:
            async with client_of(link.address, NOBODY) as client:
                reading = Reading(client)
                await reading.until_tokens(cluster.decode[0])
                await asyncio.to_thread(link.cut)
                cluster.decode[0].at["token"].let_go()
                with pytest.raises(UnavailableError, match=f"{link.address} went away in the middle of the answer"):
                    await reading.done()


async def test_nobody_there_is_told_within_bounded_attempts_and_within_the_callers_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.failover.NUM_ROUNDS", 2)
    async with client_of(NOBODY, "127.0.0.1:2") as client:
        with pytest.raises(UnavailableError, match="failed to connect"):
            await client.status()
        with pytest.raises(UnavailableError, match="failed to connect"):
            await Reading(client).done()
        with pytest.raises((UnavailableError, DeadlineError)):
            await Reading(client, timeout_s=0.01).done()


async def test_cancel_and_explain_find_the_one_that_has_it() -> None:
    async with several_ends(2) as (first, second), client_of(first.address, NOBODY, second.address) as client:
        second.decode[0].at["token"].hold()
        asked = asyncio.create_task(second.ask(request_id="mine"))
        await second.decode[0].until_reached("token")
        assert (await client.explain("mine")).state == "running"
        await client.cancel("mine")
        second.decode[0].at["token"].let_go()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await client.explain("mine")).state == "cancelled"
        with pytest.raises(NotFoundError, match="'mine' is running"):
            await client.cancel("mine")


async def test_the_blocking_client_and_the_command_take_several(capsys: pytest.CaptureFixture[str]) -> None:
    def use(address: str) -> tuple[str, str]:
        with Client(address) as client:
            events = client.generate(long_prompt(), greedy(), request_id="mine", keep_s=60.0)
            text = "".join(event.text for event in events if isinstance(event, TokensGenerated))
            return text, client.explain("mine").state

    async with several_ends(1) as (cluster,):
        address = f"{NOBODY},{cluster.address}"
        assert await asyncio.to_thread(use, address) == (ANSWER_TEXT, "finished")
        assert await asyncio.to_thread(ask.main, ["hello", "--coordinator", address]) == 0
        assert capsys.readouterr().out.startswith(ANSWER_TEXT)
