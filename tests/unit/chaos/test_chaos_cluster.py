"""When a victim counts as serving again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cluster import ClusterStatus, NodeInfo, NodeReport, NodeStatus
from kvrelay.types import InstanceId, Role
from tests.chaos.cluster import FRESH_S, ChaosCluster, Shape
from tests.chaos.plan import Victim

NODE, OTHER = Victim(Role.DECODE_NODE, 0), Victim(Role.DECODE_NODE, 1)


class Told(ChaosCluster):
    """Coordinators that answer what the test says."""

    answers: dict[int, ClusterStatus | None]

    async def status(self, coordinator: Victim) -> ClusterStatus | None:
        return self.answers[coordinator.index]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path, tmp_path, Shape())
    yield told
    told.kill()


def status_of(cluster: ChaosCluster, *members: Victim, age_s: float = 0.1, ready: bool = True) -> ClusterStatus:
    reports = (
        NodeReport(
            NodeInfo(member.role, InstanceId(member.name), cluster.addresses[member], None), NodeStatus(ready), age_s
        )
        for member in members
    )
    return ClusterStatus(tuple(reports), num_queued=0, num_running=0, ready=True)


async def is_whole(cluster: Told, first: ClusterStatus | None, second: ClusterStatus | None) -> bool:
    cluster.answers = {0: first, 1: second}
    return await cluster.wait_whole(NODE, timeout_s=0.01)


async def test_a_node_is_whole_when_every_coordinator_that_answers_has_it(cluster: Told) -> None:
    has, lacks = status_of(cluster, NODE, OTHER), status_of(cluster, OTHER)
    assert await is_whole(cluster, has, has)
    assert await is_whole(cluster, has, None)
    assert not await is_whole(cluster, has, lacks)


async def test_no_node_is_whole_when_no_coordinator_answers(cluster: Told) -> None:
    assert not await is_whole(cluster, None, None)


async def test_a_member_that_is_silent_or_not_ready_is_not_whole(cluster: Told) -> None:
    assert not await is_whole(cluster, status_of(cluster, NODE, age_s=FRESH_S), None)
    assert not await is_whole(cluster, status_of(cluster, NODE, ready=False), None)
