"""What ends when a node is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from coordinator.cluster import Cluster
from coordinator.members import Member, Members
from coordinator.nodes import Nodes
from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.errors import AlreadyCommittedError, DeadlineError, KVRelayError, OverloadedError, UnavailableError
from kvrelay.types import InstanceId, Role
from tests.support.fake_nodes import MODEL


def info(instance_id: str, address: str = "10.0.0.1:7420") -> NodeInfo:
    return NodeInfo(Role.DECODE_NODE, InstanceId(instance_id), address, MODEL)


def usable(cluster: Cluster, instance_id: str, address: str = "10.0.0.1:7420") -> Member:
    member = cluster.join(info(instance_id, address))
    cluster.update(member, NodeStatus(ready=True))
    return member


def replace(cluster: Cluster, member: Member, instance_id: str) -> None:
    """The process has died, which breaks its stream, and another takes its place."""
    cluster.disconnect(member)
    cluster.make_way(info(instance_id, member.info.address))
    cluster.join(info(instance_id, member.info.address))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def wait_on(cluster: Cluster, member: Member) -> None:
    async with cluster.while_member(member):
        await asyncio.Event().wait()


async def test_work_on_a_node_ends_when_a_new_process_takes_its_place_and_no_other_work_does() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member, other = cluster.join(info("old")), cluster.join(info("other", "10.0.0.2:7420"))
    works, goes_on = asyncio.create_task(wait_on(cluster, member)), asyncio.create_task(wait_on(cluster, other))
    await asyncio.sleep(0)
    replace(cluster, member, "new")
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="is lost"):
            await wait_on(cluster, member)
    assert cluster.members.all() == []
    cluster.close()


async def test_a_node_lost_twice_ends_its_work_once_and_others_are_still_found_silent() -> None:
    """The work is slow to end, as when the event loop was blocked: the node came back and went again meanwhile."""
    cluster, may_end = Cluster(Members(timeout_s=0.1), Nodes(), lambda: None), asyncio.Event()

    async def work(member: Member) -> None:
        async with cluster.while_member(member):
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()

    works = asyncio.create_task(work(cluster.join(info("node"))))
    await until(lambda: cluster.members.all() == [])
    cluster.join(info("node"))
    cluster.join(info("other", "10.0.0.2:7420")).last_seen += 0.1
    await until(lambda: cluster.members.all() == [])
    may_end.set()
    with pytest.raises(UnavailableError, match="is lost"):
        await works
    cluster.close()


async def test_what_fails_because_its_node_is_lost_opens_no_circuit() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member = usable(cluster, "old")
    works = [asyncio.create_task(wait_on(cluster, member)) for _ in range(2)]
    await asyncio.sleep(0)
    replace(cluster, member, "new")
    for error in await asyncio.gather(*works, return_exceptions=True):
        assert isinstance(error, UnavailableError)
        cluster.failed(error, member)
    assert cluster.circuits.num_open == 0
    cluster.close()


@pytest.mark.parametrize("leave", ["drains", "disconnects"])
async def test_a_leaving_nodes_failures_do_not_count(leave: str) -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member, other = usable(cluster, "node"), usable(cluster, "other", "10.0.0.2:7420")
    if leave == "drains":
        cluster.update(member, NodeStatus(ready=True, draining=True))
    else:
        cluster.disconnect(member)
    for party in ((member,), (other, member)):
        for _ in range(2):
            cluster.failed(UnavailableError("the node is draining"), *party)
    assert cluster.circuits.num_open == 0
    for _ in range(2):
        cluster.failed(UnavailableError("out of order"), other)
    assert cluster.circuits.num_open == 1
    cluster.close()


async def test_a_broken_stream_is_logged_once_and_not_that_of_a_node_that_joined_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member, drained = usable(cluster, "node"), usable(cluster, "drained", "10.0.0.2:7420")
    cluster.disconnect(member)
    usable(cluster, "node")
    cluster.disconnect(member)  # the old stream's end comes late
    cluster.update(drained, NodeStatus(ready=True, draining=True))
    cluster.disconnect(drained)
    stays = usable(cluster, "stays", "10.0.0.3:7420")
    cluster.will_end_streams()
    cluster.disconnect(stays)
    assert [(record.levelname, record.message) for record in caplog.records if " left: " in record.message] == [
        ("WARNING", "decode-node 10.0.0.1:7420 left: its stream broke; it gets nothing new"),
        ("INFO", "decode-node 10.0.0.2:7420 left: its stream ended; it gets nothing new"),
    ]
    cluster.close()


async def test_a_node_that_joins_again_keeps_its_failures() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member = usable(cluster, "node")
    cluster.failed(UnavailableError("out of order"), member)
    usable(cluster, "node")
    cluster.failed(UnavailableError("out of order"), member)
    assert cluster.circuits.num_open == 1
    cluster.close()


@pytest.mark.parametrize(
    ("outcome", "is_left_to_the_next"),
    [
        (OverloadedError("busy"), True),
        (asyncio.CancelledError(), True),
        (AlreadyCommittedError("it was here before"), True),
        (DeadlineError("no answer within 2 s"), False),
        (None, False),
    ],
)
async def test_a_trial_that_showed_nothing_is_left_to_the_next_request(
    outcome: BaseException | None, is_left_to_the_next: bool
) -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    member = usable(cluster, "node")
    for _ in range(2):
        cluster.failed(UnavailableError("out of order"), member)
    assert cluster.suspects()
    await until(lambda: not cluster.suspects())
    with suppress(KVRelayError, asyncio.CancelledError), cluster.trying(member):
        assert cluster.suspects()
        if outcome is not None:
            raise outcome
    assert bool(cluster.suspects()) != is_left_to_the_next
    cluster.close()


async def test_a_cancel_of_the_work_stays_one() -> None:
    cluster = Cluster(Members(timeout_s=60.0), Nodes(), lambda: None)
    works = asyncio.create_task(wait_on(cluster, cluster.join(info("node"))))
    await asyncio.sleep(0)
    works.cancel()
    with pytest.raises(asyncio.CancelledError):
        await works
    cluster.close()
