"""Several tenants, and fake nodes with room for one request at a time: who goes next, and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from coordinator.identity import Context, Identity
from coordinator.tenants import Tenant
from kvrelay.errors import InvalidRequestError, OverloadedError
from kvrelay.inference import TextPrompt
from tests.support.answers import Answer
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy

QUEUED = "kvrelay_tenant_queued_answers"
QUEUED_TOKENS = "kvrelay_tenant_queued_tokens"


class Line:
    """Asks one after another, so that each is where it belongs before the next one comes. Answers take 34 of 36 blocks
    and 540 tokens, a little more than a round's credit at weight 1."""

    def __init__(self, cluster: Ends) -> None:
        self.cluster = cluster
        self.caller = Tenant()
        self.asked: list[asyncio.Task[Answer]] = []

    def identify(self, context: Context) -> Identity:
        return Identity(self.caller)

    async def ask(self, name: str, priority: int | None = None) -> None:
        """By the tenant of the name's first letter."""
        self.caller = Tenant(name[0])
        prompt = TextPrompt(name[:2] + "0123456789" * 50)  # nobody finds another one's prefix
        ask = self.cluster.ask(prompt, greedy(max_tokens=38), request_id=name, priority=priority)
        self.asked.append(asyncio.create_task(ask))
        if len(self.asked) == 1:
            await self.cluster.decode[0].until_reached("token")
        else:
            await self.cluster.until_queued(len(self.asked) - 1)
        if len(self.asked) == 2:
            async with asyncio.timeout(TIMEOUT_S):
                while not self.cluster.metric("kvrelay_request_edges_total", edge="refused"):
                    await asyncio.sleep(0.01)

    async def order(self) -> list[str]:
        """In which they were served."""
        self.cluster.decode[0].at["token"].let_go()
        await asyncio.gather(*self.asked)
        return [request.request_id.partition("#")[0] for request in self.cluster.decode[0].requests]


@asynccontextmanager
async def line(tenants: str = "", **settings: float) -> AsyncIterator[Line]:
    standing: list[Line] = []
    identify = lambda context: standing[0].identify(context)  # noqa: E731
    async with ends(blocks=36, identify=identify, tenants=tenants, **settings) as cluster:
        cluster.decode[0].at["token"].hold()
        standing.append(Line(cluster))
        yield standing[0]
        cluster.decode[0].at["token"].let_go()


async def order_of(line: Line, names: Sequence[str]) -> list[str]:
    for name in names:
        await line.ask(name)
    return await line.order()


async def test_a_tenant_that_came_first_with_all_it_has_does_not_make_the_others_wait_for_all_of_it() -> None:
    async with line("a:weight=1;b:weight=2") as waiting:
        order = await order_of(waiting, ["a0", "a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"])
        assert order == ["a0", "a1", "a2", "b1", "b2", "a3", "b3", "b4", "a4"]


async def test_priority_decides_among_a_tenants_own() -> None:
    async with line("b:priority=20") as waiting:
        for name, priority in (("a0", None), ("a1", None), ("a2", -10), ("a3", None), ("a4", 90), ("b1", None)):
            await waiting.ask(name, priority)
        assert await waiting.order() == ["a0", "a1", "a4", "b1", "a3", "a2"]


async def test_a_tenants_usual_priority_holds_where_a_request_names_none() -> None:
    async with line("a:priority=50") as waiting:
        for name, priority in (("a0", None), ("a1", None), ("a2", 0), ("a3", None)):
            await waiting.ask(name, priority)
        assert await waiting.order() == ["a0", "a1", "a3", "a2"]


@pytest.mark.parametrize("priority", [-101, 101])
async def test_priority_out_of_range_is_the_clients_mistake(priority: int) -> None:
    async with ends() as cluster:
        with pytest.raises(InvalidRequestError, match=rf"priority is {priority}; allowed is \[-100, 100\]"):
            await cluster.ask(priority=priority)


async def test_a_tenant_has_its_own_bounds_and_is_counted_by_itself() -> None:
    async with line("a:max_queued=2;b:max_queued_tokens=1000") as waiting:
        for name in ("a0", "a1", "a2", "b1"):
            await waiting.ask(name)
        cluster = waiting.cluster
        assert [cluster.metric(QUEUED, tenant=tenant) for tenant in "ab"] == [2, 1]
        assert [cluster.metric(QUEUED_TOKENS, tenant=tenant) for tenant in "ab"] == [1080, 540]
        for tenant, message in (
            ("a", "2 answers wait already, and 1 more would be over the 2 that tenant 'a' may queue"),
            ("b", "answers of 540 tokens of tenant 'b' wait already, and 540 more would be over the 1000 that may"),
        ):
            waiting.caller = Tenant(tenant)
            with pytest.raises(OverloadedError, match=message) as refused:
                await cluster.ask(TextPrompt("xy" + "0123456789" * 50), greedy(max_tokens=38))
            assert refused.value.retry_after_s >= 1.0
        await waiting.order()
        assert [cluster.metric(QUEUED, tenant=tenant) for tenant in "ab"] == [0, 0]
        assert [cluster.metric(QUEUED_TOKENS, tenant=tenant) for tenant in "ab"] == [0, 0]


async def test_a_place_that_comes_free_is_for_whoever_was_told_to_come_back_for_it() -> None:
    async with line(max_queue=2) as waiting:
        for name in ("a0", "a1", "a2"):
            await waiting.ask(name)
        ask, prompt, sampling = waiting.cluster.ask, TextPrompt("xy" + "0123456789" * 50), greedy(max_tokens=38)
        with pytest.raises(OverloadedError, match="2 answers wait already, and 1 more would be over the 2") as refused:
            await ask(prompt, sampling, request_id="patient")
        assert refused.value.retry_after_s >= 1.0
        waiting.asked.pop().cancel()
        await waiting.cluster.until_queued(1)
        for request_id in ("", "another"):
            with pytest.raises(OverloadedError, match="where 1 are kept for others"):
                await ask(prompt, sampling, request_id=request_id)
        waiting.asked.append(asyncio.create_task(ask(prompt, sampling, request_id="patient")))
        await waiting.cluster.until_queued(2)
        assert await waiting.order() == ["a0", "a1", "patient"]


async def test_no_place_is_promised_under_an_id_that_no_request_may_have() -> None:
    """A promise is kept in memory by its id, and a client may write one of megabytes."""
    async with line(max_queue=1) as waiting:
        for name in ("a0", "a1"):
            await waiting.ask(name)
        with pytest.raises(InvalidRequestError, match="a request id is 1 to 128 printable ASCII characters"):
            await waiting.cluster.ask(request_id="x" * 129)
        with pytest.raises(OverloadedError, match="1 answers wait already"):
            await waiting.cluster.ask(request_id="x" * 128)
        await waiting.order()


async def test_tenants_that_nobody_can_prove_to_be_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async with ends(tenants="acme:weight=3;default:weight=1;*:max_queued=32"):
        pass
    async with line("acme:weight=3"):
        pass
    warnings = [record.message for record in caplog.records if record.name == "coordinator.main"]
    assert warnings == [
        "tenants names acme, but no call is authenticated, so all are of tenant 'default': the places that these "
        "are owed stay empty; api_keys_file or jwks_file would tell them apart"
    ]


async def test_a_tenants_own_longest_wait() -> None:
    async with line("b:max_wait_s=0.3") as waiting:
        await waiting.ask("a0")
        waiting.caller = Tenant("b")
        with pytest.raises(OverloadedError, match=r"within 0\.3 s"):
            await waiting.cluster.ask(TextPrompt("b0" + "0123456789" * 50), greedy(max_tokens=38))
        await waiting.order()


async def test_clients_that_go_leave_nothing_of_their_tenant_in_the_queue() -> None:
    async with line() as waiting:
        for name in ("a0", "a1", "a2", "b1", "b2"):
            await waiting.ask(name)
        for asked in waiting.asked[1:]:
            asked.cancel()
        await waiting.cluster.until_queued(0)
        assert [waiting.cluster.metric(QUEUED_TOKENS, tenant=tenant) for tenant in "ab"] == [0, 0]
        del waiting.asked[1:]
        assert await waiting.order() == ["a0"]
