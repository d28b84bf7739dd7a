"""kill -9 in the middle of a handoff, real processes, the real model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster import NodeStatus
from kvrelay.types import Role
from tests.support import golden
from tests.support.answers import ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = next(case for case in golden.load() if case.name == "long_story_1500")


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
