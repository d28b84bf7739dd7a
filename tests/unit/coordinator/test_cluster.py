"""What ends when a node is lost."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.cluster import Cluster
from coordinator.members import Member, Members
from coordinator.nodes import Nodes
from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.errors import UnavailableError
from kvrelay.types import InstanceId, Role
from tests.support.fake_nodes import MODEL


def info(instance_id: str, address: str = "10.0.0.1:7420") -> NodeInfo:
    return NodeInfo(Role.DECODE_NODE, InstanceId(instance_id), address, MODEL)


async def wait_on(cluster: Cluster, member: Member) -> None:
    async with cluster.while_member(member):
        await asyncio.Event().wait()


async def test_work_on_a_node_ends_when_a_new_process_takes_its_place_and_no_other_work_does() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member, other = cluster.join(info("old")), cluster.join(info("other", "10.0.0.2:7420"))
    works, goes_on = asyncio.create_task(wait_on(cluster, member)), asyncio.create_task(wait_on(cluster, other))
    await asyncio.sleep(0)
    cluster.join(info("new"))
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match=r"decode-node 10\.0\.0\.1:7420 is lost"):
            await works
    assert not goes_on.done()
    goes_on.cancel()
    await asyncio.wait([goes_on])
    cluster.close()


async def test_work_on_a_node_ends_when_it_was_silent_for_too_long() -> None:
    cluster = Cluster(Members(timeout_s=0.1), Nodes(), lambda: None)
    member = cluster.join(info("silent"))
    cluster.update(member, NodeStatus(ready=True))
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="is lost"):
            await wait_on(cluster, member)
    assert cluster.members.all() == []
    cluster.close()


async def test_a_cancel_of_the_work_stays_one() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    works = asyncio.create_task(wait_on(cluster, cluster.join(info("node"))))
    await asyncio.sleep(0)
    works.cancel()
    with pytest.raises(asyncio.CancelledError):
        await works
    cluster.close()
