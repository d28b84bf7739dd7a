"""Two coordinators over the same nodes, real processes: both serve, and the death of one is no matter to the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import UnavailableError
from kvrelay.inference import TokenPrompt, TokensGenerated
from tests.support.answers import ANSWER_TIMEOUT_S, ask, holds_nothing, wait_until_quiet
from tests.support.cluster import Cluster, running
from tests.support.reference import ReferenceEngine
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NUM_NODES = 4
LEASE_S = 10.0  # a decode node's default
FREED_S = 30.0  # beyond it, keepalive included


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shape = Cluster(
        model, tmp_path_factory.mktemp("two"), num_coordinators=2, num_prefill=2, num_decode=2, num_blocks=80
    )
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@dataclass(slots=True)
class Watched:
    """A request whose answer's beginning can be waited for."""

    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    token_ids: list[int] = field(default_factory=list)

    async def ask(self, client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> None:
        events = client.generate(TokenPrompt(prompt_ids), greedy(max_tokens), timeout_s=ANSWER_TIMEOUT_S)
        async for event in events:
            if isinstance(event, TokensGenerated):
                self.token_ids += [token.token_id for token in event.tokens]
                self.has_begun.set()


async def test_load_through_both_is_answered_as_by_one_engine_alone(cluster: Cluster, model: Path) -> None:
    """40 requests of up to 15 blocks want far more than the 160 there are: room is taken, given back and found."""
    reference = ReferenceEngine(model)
    prompts = [random_prompt(20 + 10 * (number % 12), seed=number % 20) for number in range(40)]
    async with AsyncExitStack() as closing:
        clients = [await closing.enter_async_context(AsyncClient(address)) for address in cluster.addresses]
        answers = await asyncio.gather(
            *(ask(clients[number % 2], prompt_ids, greedy(100)) for number, prompt_ids in enumerate(prompts))
        )
        for prompt_ids, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == expected(reference, prompt_ids, 100)
            assert answer.finished.retries == 0
        for client in clients:
            await wait_until_quiet(client, NUM_NODES)


async def test_kill_9_of_one_ends_its_streams_and_no_other(cluster: Cluster, model: Path) -> None:
    """A client that knows both gets its answer whole."""
    reference = ReferenceEngine(model)
    doomed, alive = cluster.addresses
    async with AsyncClient(doomed) as theirs, AsyncClient(alive) as ours, AsyncClient([doomed, alive]) as either:
        watched = [Watched(), Watched()]
        lost, moved = (
            asyncio.create_task(one.ask(client, random_prompt(100, 100 + number), 800))
            for number, (one, client) in enumerate(zip(watched, (theirs, either), strict=True))
        )
        kept = [asyncio.create_task(ask(ours, random_prompt(100, 200 + number), greedy(300))) for number in range(2)]
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await watched[0].has_begun.wait()  # not the other too: this one might be over by then
        assert not lost.done()
        cluster.coordinators[0].kill()
        with pytest.raises(UnavailableError):
            await lost
        for number, task in enumerate(kept):
            assert (await task).token_ids == expected(reference, random_prompt(100, 200 + number), 300)
        await moved
        assert tuple(watched[1].token_ids) == expected(reference, random_prompt(100, 101), 800)
        async with asyncio.timeout(LEASE_S + FREED_S):  # and no new traffic meanwhile
            while not holds_nothing(await ours.status(), NUM_NODES):
                await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.coordinators[0].restart)
        answer = await ask(theirs, random_prompt(100, 300), greedy(20))
        assert answer.token_ids == expected(reference, random_prompt(100, 300), 20)


async def test_both_know_what_is_cached_also_by_requests_of_the_other_and_from_before_they_restarted(
    cluster: Cluster,
) -> None:
    async with AsyncClient(cluster.addresses[1]) as client:
        await ask(client, random_prompt(100, 400), greedy(5))
        await wait_until_quiet(client, NUM_NODES)
    await asyncio.to_thread(cluster.coordinators[0].kill)
    await asyncio.to_thread(cluster.coordinators[0].restart)
    for role, nodes in (("prefill-node", cluster.prefill), ("decode-node", cluster.decode)):
        num_cached = sum(node.metric("kvrelay_kv_blocks", state="cached") for node in nodes)
        assert num_cached >= 6
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            for coordinator in cluster.coordinators:
                while coordinator.metric("kvrelay_prefix_index_blocks", role=role) != num_cached:
                    await asyncio.sleep(0.05)
