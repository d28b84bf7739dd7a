"""kill -9 in the middle of a handoff and in the middle of answers: real processes, the real model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster import NodeStatus
from kvrelay.inference import RequestFinished, TokenPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams
from kvrelay.types import Role
from tests.support import golden
from tests.support.answers import ANSWER_TIMEOUT_S, GREEDY_64, Answer, ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = next(case for case in golden.load() if case.name == "long_story_1500")
SHORT = sorted(golden.load(), key=lambda case: len(case.prompt_ids))[:6]
SAMPLED = SamplingParams(temperature=0.8, seed=1234, max_tokens=64, ignore_eos=True)


async def node_at_work(cluster: Cluster, client: AsyncClient) -> RoleProcess:
    """The prefill node whose handoff is on its way: the decode node has received blocks of it."""
    async with asyncio.timeout(60):
        while cluster.decode[0].metric("kvrelay_handoff_blocks_received_total") < 4:
            await asyncio.sleep(0.01)
    status = await client.status()
    running_nodes = {
        report.info.address
        for report in status.nodes
        if report.info.role is Role.PREFILL_NODE and is_busy(report.status)
    }
    return next(node for node in cluster.prefill if node.address in running_nodes)


def is_busy(status: NodeStatus) -> bool:
    return status.num_running > 0


async def test_prefill_node_killed_in_the_middle_of_a_handoff(demo_model: Path, tmp_path: Path) -> None:
    slow = ["--chunk-tokens", "32"]
    with running(Cluster(demo_model, tmp_path, num_prefill=2, prefill_args=slow, with_store=False)) as cluster:
        async with AsyncClient(cluster.address) as client:
            asking = asyncio.create_task(ask(client, LONG.prompt_ids))
            victim = await node_at_work(cluster, client)
            assert not asking.done()
            victim.kill()
            answer = await asking
            assert answer.token_ids == LONG.output_ids
            assert answer.finished.retries == 1
            assert answer.finished.prefill_node != victim.address
            assert answer.finished.usage.prompt_tokens == len(LONG.prompt_ids)
            await wait_until_quiet(client, num_nodes=2)


class Asked:
    """One answer as it grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.begun = asyncio.Event()  # eight tokens are here

    async def run(self, client: AsyncClient, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Answer:
        finished: RequestFinished | None = None
        async for event in client.generate(TokenPrompt(prompt_ids), sampling, timeout_s=ANSWER_TIMEOUT_S):
            if isinstance(event, TokensGenerated):
                self.token_ids += [token.token_id for token in event.tokens]
                if len(self.token_ids) >= 8:
                    self.begun.set()
            elif isinstance(event, RequestFinished):
                finished = event
        assert finished is not None
        return Answer(tuple(self.token_ids), "", finished)


async def test_decode_node_killed_in_the_middle_of_answers(demo_model: Path, tmp_path: Path) -> None:
    """Greedy answers are the reference's; drawn ones are what they were when nobody died."""
    jobs = [(case.prompt_ids, GREEDY_64) for case in SHORT] + [(case.prompt_ids, SAMPLED) for case in SHORT]
    with running(Cluster(demo_model, tmp_path, num_decode=2, with_store=False)) as cluster:
        async with AsyncClient(cluster.address) as client:
            undisturbed = [await ask(client, case.prompt_ids, SAMPLED) for case in SHORT]
            asked = [Asked() for _ in jobs]
            asking = [asyncio.create_task(one.run(client, *job)) for one, job in zip(asked, jobs, strict=True)]
            async with asyncio.timeout(60):
                await asyncio.gather(*(one.begun.wait() for one in asked))
            assert not any(task.done() for task in asking)
            victim = cluster.decode[0]
            victim.kill()
            answers = await asyncio.gather(*asking)
            await wait_until_quiet(client, num_nodes=2)
    expected = [case.output_ids for case in SHORT] + [answer.token_ids for answer in undisturbed]
    assert [answer.token_ids for answer in answers] == expected
    assert all(answer.finished.usage.completion_tokens == 64 for answer in answers)
    assert {answer.finished.decode_node for answer in answers} == {cluster.decode[1].address}
    assert sum(answer.finished.retries for answer in answers) > 0
