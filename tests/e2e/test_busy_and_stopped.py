"""A peer that stands still, real processes: one that is only busy keeps its work, one that is stopped loses it soon."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.types import Role
from tests.support.answers import wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running
from tests.support.reference import ReferenceEngine
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_NODES = 4
BUSY_S = 8  # and no retry: on cores that others take it all from, keepalive's answers are late too
PATIENT_S = 120  # of leases, senders and the coordinator: what is found sooner was found by keepalive
# Keepalive finds it in 2 to 4 s, and with gRPC's own ping timeout in 60; the rest is for the answer to go on elsewhere,
# on cores that much else may share.
FOUND_AND_RESUMED_S = 40.0


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("still")
    shape = Cluster(
        model,
        directory,
        num_prefill=2,
        num_decode=2,
        num_blocks=128,
        with_store=False,
        coordinator_args=["--member-timeout-s", f"{PATIENT_S}"],
        prefill_args=["--handoff-stall-s", f"{PATIENT_S}"],
        decode_args=["--lease-s", f"{PATIENT_S}"],
        busy_signal=True,
    )
    with running(shape) as started:
        yield started


class Watched:
    """An answer as it comes, and when its tokens came."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.finished: RequestFinished | None = None

    async def read(self, client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> Watched:
        async for event in client.generate(TokenPrompt(prompt_ids), greedy(max_tokens), timeout_s=120.0):
            if isinstance(event, TokensGenerated):
                self.token_ids += [token.token_id for token in event.tokens]
                self.token_times.append(time.monotonic())
            elif isinstance(event, RequestFinished):
                self.finished = event
        return self

    async def until_begun(self) -> None:
        async with asyncio.timeout(60):
            while not self.token_ids:
                await asyncio.sleep(0.005)

    def longest_gap_after(self, moment: float) -> float:
        times = [moment, *(at for at in self.token_times if at > moment)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


async def working(nodes: list[RoleProcess], client: AsyncClient, role: Role) -> RoleProcess:
    """The node of a role that computes now."""
    async with asyncio.timeout(60):
        while True:
            status = await client.status()
            busy = {one.info.address for one in status.nodes if one.info.role is role and one.status.num_running}
            for node in nodes:
                if node.address in busy:
                    return node


async def is_ready(client: AsyncClient, node: RoleProcess) -> bool:
    status = await client.status()
    return any(one.status.ready for one in status.nodes if one.info.address == node.address)


@pytest.mark.alone
async def test_a_decode_node_whose_interpreter_is_busy_for_8_s_keeps_its_answers(
    cluster: Cluster, reference: ReferenceEngine
) -> None:
    prompt_ids = random_prompt(100, 1)
    async with AsyncClient(cluster.address) as client:
        watched = Watched()
        asked = asyncio.create_task(watched.read(client, prompt_ids, 900))
        await watched.until_begun()
        node = await working(cluster.decode, client, Role.DECODE_NODE)
        began = time.monotonic()
        node.signal(signal.SIGUSR1)
        answer = await asked
        assert answer.finished is not None
        assert answer.longest_gap_after(began) > BUSY_S - 2  # it did stand still
        assert tuple(answer.token_ids) == expected(reference, prompt_ids, 900)
        assert (answer.finished.retries, answer.finished.decode_node) == (0, node.address)
        await wait_until_quiet(client, NUM_NODES)  # all of them ready


@pytest.mark.alone
async def test_a_prefill_node_whose_interpreter_is_busy_for_8_s_keeps_its_prompts(
    cluster: Cluster, reference: ReferenceEngine
) -> None:
    """All are busy from before the requests come, so that each must wait for one."""
    prompts = [random_prompt(300, 10 + number) for number in range(4)]
    async with AsyncClient(cluster.address) as client:
        for node in cluster.prefill:
            node.signal(signal.SIGUSR1)
        began = time.monotonic()
        answers = await asyncio.gather(*(Watched().read(client, prompt_ids, 20) for prompt_ids in prompts))
        assert time.monotonic() - began > BUSY_S - 2
        for prompt_ids, answer in zip(prompts, answers, strict=True):
            assert answer.finished is not None
            assert tuple(answer.token_ids) == expected(reference, prompt_ids, 20)
            assert answer.finished.retries == 0
        await wait_until_quiet(client, NUM_NODES)


async def test_a_stopped_decode_node_is_found_by_its_broken_streams_and_the_answer_goes_on(
    cluster: Cluster, reference: ReferenceEngine
) -> None:
    prompt_ids = random_prompt(100, 2)
    async with AsyncClient(cluster.address) as client:
        watched = Watched()
        asked = asyncio.create_task(watched.read(client, prompt_ids, 900))
        await watched.until_begun()
        node = await working(cluster.decode, client, Role.DECODE_NODE)
        stopped = time.monotonic()
        node.signal(signal.SIGSTOP)
        try:
            answer = await asked
            # Its membership is another connection than its answers': each is found by its own keepalive.
            async with asyncio.timeout(stopped + FOUND_AND_RESUMED_S - time.monotonic()):
                while await is_ready(client, node):
                    await asyncio.sleep(0.01)
        finally:
            node.signal(signal.SIGCONT)
        assert answer.finished is not None
        assert answer.longest_gap_after(stopped) < FOUND_AND_RESUMED_S
        assert tuple(answer.token_ids) == expected(reference, prompt_ids, 900)
        assert (answer.finished.retries, answer.finished.decode_node == node.address) == (1, False)
        await wait_until_quiet(client, NUM_NODES)  # it has joined again


async def test_a_stopped_prefill_node_is_found_and_its_prompt_computed_by_the_other(
    cluster: Cluster, reference: ReferenceEngine
) -> None:
    prompt_ids = random_prompt(900, 3)
    async with AsyncClient(cluster.address) as client:
        watched = Watched()
        for node in cluster.prefill:  # both, so that the prompt is at one of them for sure
            node.signal(signal.SIGSTOP)
        asked = asyncio.create_task(watched.read(client, prompt_ids, 50))
        stopped = time.monotonic()
        try:
            async with asyncio.timeout(60):
                while (await client.status()).num_running == 0:
                    await asyncio.sleep(0.01)
            cluster.prefill[1].signal(signal.SIGCONT)
            await watched.until_begun()
            assert time.monotonic() - stopped < FOUND_AND_RESUMED_S
            answer = await asked
        finally:
            for node in cluster.prefill:
                node.signal(signal.SIGCONT)
        assert answer.finished is not None
        assert tuple(answer.token_ids) == expected(reference, prompt_ids, 50)
        assert answer.finished.prefill_node == cluster.prefill[1].address
        await wait_until_quiet(client, NUM_NODES)
