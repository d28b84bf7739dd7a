"""A node joins, reports, and comes back, whatever happens to its coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.errors import ForeignBlockError
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc
from kvrelay.rpc import convert_cluster
from kvrelay.rpc.membership import Membership
from kvrelay.types import BlockCounts
from tests.support.cluster import free_port
from tests.support.grpc_ends import Proxy, serving
from tests.support.messages import EXAMPLE_NODE

NEVER_S = 3600.0


class FakeCoordinator(cluster_pb2_grpc.ClusterServicer):
    def __init__(self) -> None:
        self.refusal: Exception | None = None
        self.joined: list[NodeInfo] = []
        self.statuses: asyncio.Queue[NodeStatus] = asyncio.Queue()
        self.left = asyncio.Event()

    async def Join(self, request_iterator: AsyncIterator[cluster_pb2.NodeEvent], context: Any) -> AsyncIterator[Any]:
        try:
            async for event in request_iterator:
                if event.WhichOneof("event") == "status":
                    self.statuses.put_nowait(convert_cluster.node_status_from_pb(event.status))
                    continue
                self.joined.append(convert_cluster.node_info_from_pb(event.joined))
                if self.refusal:
                    raise self.refusal
                yield cluster_pb2.JoinEvent(accepted=cluster_pb2.JoinAccepted(coordinator_instance_id="c"))
        finally:
            self.left.set()

    def register(self, server: grpc.aio.Server) -> None:
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, server)


class Node:
    """The status a node reports; set `num_running` to change it."""

    def __init__(self) -> None:
        self.num_running = 0

    def status(self) -> NodeStatus:
        return NodeStatus(ready=True, blocks=BlockCounts(total=8, free=8), num_running=self.num_running)


@asynccontextmanager
async def member(port: int, node: Node | None = None, interval_s: float = NEVER_S) -> AsyncIterator[Membership]:
    membership = Membership(f"127.0.0.1:{port}", EXAMPLE_NODE, (node or Node()).status, interval_s=interval_s)
    await membership.start()
    try:
        async with asyncio.timeout(60.0):
            yield membership
    finally:
        await membership.close()


async def test_a_node_introduces_itself_and_reports_at_once() -> None:
    coordinator = FakeCoordinator()
    async with serving(coordinator.register) as port, member(port) as membership:
        await membership.wait_joined()
        status = await coordinator.statuses.get()

    assert coordinator.joined == [EXAMPLE_NODE]
    assert status == NodeStatus(ready=True, blocks=BlockCounts(total=8, free=8))


async def test_it_reports_every_interval() -> None:
    coordinator = FakeCoordinator()
    async with serving(coordinator.register) as port, member(port, interval_s=0.01):
        for _ in range(5):
            await coordinator.statuses.get()


async def test_a_change_is_reported_at_once_and_many_as_one() -> None:
    coordinator, node = FakeCoordinator(), Node()
    async with serving(coordinator.register) as port, member(port, node) as membership:
        assert (await coordinator.statuses.get()).num_running == 0
        for node.num_running in (1, 2, 3):
            membership.changed()
        assert (await coordinator.statuses.get()).num_running == 3
        node.num_running = 4
        membership.changed()
        assert (await coordinator.statuses.get()).num_running == 4
        assert coordinator.statuses.empty()


async def test_closing_ends_the_stream_at_the_coordinator() -> None:
    coordinator = FakeCoordinator()
    async with serving(coordinator.register) as port:
        async with member(port) as membership:
            await membership.wait_joined()
        async with asyncio.timeout(30.0):
            await coordinator.left.wait()
        assert not membership.joined


async def test_it_joins_again_when_the_coordinator_restarts() -> None:
    first, second = FakeCoordinator(), FakeCoordinator()
    async with serving(first.register, port=free_port()) as port:
        membership = Membership(f"127.0.0.1:{port}", EXAMPLE_NODE, Node().status)
        await membership.start()
        await membership.wait_joined()
    async with asyncio.timeout(60.0):
        await membership.wait_left()
        async with serving(second.register, port=port):
            await membership.wait_joined()
            await second.statuses.get()
            await membership.close()

    assert second.joined == [EXAMPLE_NODE]


async def test_it_waits_for_a_coordinator_that_starts_later() -> None:
    port, coordinator = free_port(), FakeCoordinator()
    async with member(port) as membership:
        await membership.wait_left()
        async with serving(coordinator.register, port=port):
            await membership.wait_joined()


async def test_a_coordinator_that_ends_the_stream_is_joined_again() -> None:
    class Ending(FakeCoordinator):
        async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            async for event in super().Join(request_iterator, context):
                yield event
                if len(self.joined) == 1:
                    return

    coordinator = Ending()
    async with serving(coordinator.register) as port, member(port) as membership:
        while len(coordinator.joined) < 2:
            await coordinator.statuses.get()
        await membership.wait_joined()


async def test_a_coordinator_whose_link_goes_silent_is_noticed_by_keepalive() -> None:
    coordinator = FakeCoordinator()
    async with serving(coordinator.register) as port, Proxy(port).running() as proxy, member(proxy.port) as membership:
        await membership.wait_joined()
        proxy.cut()
        async with asyncio.timeout(40.0):  # keepalive takes 4, and 60 with gRPC's own ping timeout
            await membership.wait_left()
        assert not membership.joined


async def test_a_refusal_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = FakeCoordinator()
    coordinator.refusal = ForeignBlockError("another model is served here")
    caplog.set_level(logging.INFO)
    async with serving(coordinator.register) as port, member(port) as membership:
        while len(coordinator.joined) < 3:
            coordinator.left.clear()
            await coordinator.left.wait()
        refusals = [record for record in caplog.records if "another model is served here" in record.getMessage()]
        assert not membership.joined
        coordinator.refusal = None
        await membership.wait_joined()

    assert [record.name for record in refusals].count("kvrelay.rpc.membership") == 1


async def test_a_status_that_cannot_be_read_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> NodeStatus:
        raise ZeroDivisionError

    coordinator = FakeCoordinator()
    async with serving(coordinator.register) as port:
        membership = Membership(f"127.0.0.1:{port}", EXAMPLE_NODE, broken)
        await membership.start()
        async with asyncio.timeout(30.0):
            await coordinator.left.wait()
        await membership.close()

    assert "cannot report the node's status" in caplog.text


async def test_closing_before_it_ever_joined() -> None:
    async with member(free_port()) as membership:
        pass
    await membership.close()
    assert not membership.joined
