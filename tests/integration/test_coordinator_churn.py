"""Nodes join, drain, leave, die and change weight in a random order while requests never stop: none of them is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest

from kvrelay.cluster import ClusterStatus, NodeRates, NodeReport, NodeStatus
from kvrelay.errors import KVRelayError
from kvrelay.inference import RequestAccepted, RequestFinished, TextPrompt, TokensGenerated
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import NodeClient
from tests.support.coordinator_ends import Ends, ends, greedy
from tests.support.fake_nodes import ANSWER_IDS, FakeDecodeNode, FakeNode, FakePrefillNode

NUM_CLIENTS = 6
NUM_STEPS = 40
MAX_NODES = 4  # of a role
TIMEOUT_S = 120.0
MEASURED = NodeRates(prefill_tokens_per_s=10_000, handoff_bytes_per_s=1e9, step_s=0.01, step_row_s=0.001)


class Decode(FakeDecodeNode):
    def status(self) -> NodeStatus:
        return replace(super().status(), num_running=len(self.reservations))


class Prefill(FakePrefillNode):
    def status(self) -> NodeStatus:
        return replace(super().status(), num_running=self.num_running)


class Clients:
    """Ask again and again; each answer is checked as it comes."""

    def __init__(self, cluster: Ends, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._answered = asyncio.Event()
        self._stopped = False
        self.num_answers = 0
        self.num_retries = 0

    async def run(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        while not self._stopped:
            prompt = TextPrompt(f"{draw.randrange(10)}" * draw.randrange(1, 100))
            await self._ask(prompt, draw.choice((1, 10, len(ANSWER_IDS))))
            self.num_answers += 1
            self._answered.set()
            self._answered = asyncio.Event()

    def stop(self) -> None:
        """Each ends with the answer it is at."""
        self._stopped = True

    async def more_answers(self, num_more: int) -> None:
        wanted = self.num_answers + num_more
        while self.num_answers < wanted:
            await self._answered.wait()

    async def _ask(self, prompt: TextPrompt, max_tokens: int) -> None:
        is_accepted, token_ids, failure = False, list[int](), None
        try:
            async with aclosing(self._cluster.client.generate(prompt, greedy(max_tokens=max_tokens))) as events:
                async for event in events:
                    if isinstance(event, RequestAccepted):
                        is_accepted = True
                    elif isinstance(event, TokensGenerated):
                        token_ids += [token.token_id for token in event.tokens]
                    elif isinstance(event, RequestFinished):
                        self.num_retries += event.retries
        except KVRelayError as error:
            failure = error
        if failure is None:
            assert tuple(token_ids) == ANSWER_IDS[:max_tokens]
        else:
            assert failure.retryable, failure
            assert not is_accepted, f"lost after {len(token_ids)} tokens: {failure}"


class Churn:
    """What is done to the nodes, one thing at a time. Each role always has one that nothing is done to."""

    def __init__(self, cluster: Ends, clients: Clients, seed: int, rates: NodeRates) -> None:
        """`rates` are what all nodes say they measured."""
        self._cluster = cluster
        self._clients = clients
        self._rates = rates
        self._draw = random.Random(seed)
        self._num_started = 0
        self.num_killed_at_work = 0

    async def join(self, kind: str) -> None:
        if len(self._nodes(kind)) == MAX_NODES:
            return
        self._num_started += 1
        node: Decode | Prefill
        if kind == "decode":
            node = Decode(f"decode-{self._num_started}", num_blocks=24)
            self._cluster.decode.append(node)
        else:
            node = Prefill(self._cluster.decode, f"prefill-{self._num_started}")
            self._cluster.prefill.append(node)
        node.rates = self._rates
        await node.start(self._cluster.address)
        await self._until(node, lambda report: report.status.ready)

    async def drain(self, kind: str) -> None:
        """As SIGTERM does, and then the node is gone."""
        if (node := self._spare(kind)) is not None:
            node.draining = True
            node.tell()
            await self._until(node, lambda report: report.status.draining)
            await node.until(lambda: node.idle)
            await self._remove(node)

    async def kill(self, kind: str) -> None:
        """In the middle of an answer, if it gets one while others are given; the coordinator finds out by its calls."""
        node = self._spare(kind)
        if node is None:
            return
        stage = node.at["token" if isinstance(node, Decode) else "compute"]
        stage.hold()
        others = asyncio.create_task(self._clients.more_answers(3))
        works = asyncio.create_task(node.until(lambda: not node.idle))
        await asyncio.wait({others, works}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (others, works):
            waiting.cancel()
        self.num_killed_at_work += not node.idle
        await node.kill()
        await self._clients.more_answers(1)
        await self._remove(node)

    async def leave(self, kind: str) -> None:
        """Without a word, its stream first."""
        if (node := self._spare(kind)) is not None:
            await self._remove(node)

    async def weigh(self, kind: str) -> None:
        weight = self._draw.choice((0.0, 0.5, 1.0, 3.0))
        if (node := self._spare(kind)) is not None:
            async with open_channel(node.address) as channel:
                await NodeClient(channel).set_weight(weight)
            await self._until(node, lambda report: report.status.weight == weight)

    async def step(self) -> None:
        what = self._draw.choice((self.join, self.join, self.drain, self.kill, self.leave, self.weigh, self.weigh))
        await what(self._draw.choice(("prefill", "decode")))
        await self._clients.more_answers(self._draw.randrange(4))

    def _nodes(self, kind: str) -> list[FakeNode]:
        return [*(self._cluster.decode if kind == "decode" else self._cluster.prefill)]

    def _spare(self, kind: str) -> FakeNode | None:
        """One without which there is still one that takes requests."""
        usable = [node for node in self._nodes(kind) if node.control.weight]
        spare = [node for node in self._nodes(kind) if node not in usable or len(usable) > 1]
        return self._draw.choice(spare) if spare else None

    async def _remove(self, node: FakeNode) -> None:
        await node.stop()
        for nodes in (self._cluster.decode, self._cluster.prefill):
            if node in nodes:
                nodes.remove(node)  # type: ignore[arg-type]

    async def _until(self, node: FakeNode, condition: Callable[[NodeReport], bool]) -> None:
        def reached(status: ClusterStatus) -> bool:
            reports = [report for report in status.nodes if report.info.instance_id == node.instance_id]
            return any(map(condition, reports))

        await self._cluster.until_status(reached)


@pytest.mark.parametrize(("seed", "rates"), [(1, NodeRates()), (2, MEASURED)], ids=["not measured", "measured"])
async def test_adding_and_removing_nodes_under_load_loses_nothing(seed: int, rates: NodeRates) -> None:
    # So many retries, and so long waits, that only a request which nobody can serve runs out of them.
    waits = {"member_timeout_s": 60.0, "no_node_wait_s": TIMEOUT_S, "max_queue_wait_s": TIMEOUT_S}
    async with ends(0, 0, max_retries=100, **waits) as cluster:
        clients = Clients(cluster, seed)
        churn = Churn(cluster, clients, seed, rates)
        for kind in ("prefill", "prefill", "decode", "decode"):
            await churn.join(kind)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(clients.run(number))
            await churn.kill("decode")
            await churn.join("decode")
            for _ in range(NUM_STEPS):
                await churn.step()
            clients.stop()
        assert churn.num_killed_at_work > 0
        assert clients.num_retries > 0
