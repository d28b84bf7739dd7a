"""The coordinator's channels to nodes: reservations given back over them, and none opened to a node that is lost."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.nodes import Nodes
from kvrelay.messages import NodeRequest
from kvrelay.types import RequestId
from tests.support.coordinator_ends import greedy
from tests.support.fake_nodes import FakeDecodeNode

REQUEST = NodeRequest(RequestId("r"), (3, 4, 5), 3, greedy())


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_reservation_is_given_back_unless_its_node_is_lost(is_lost: bool) -> None:
    node, nodes = FakeDecodeNode(), Nodes()
    await node.start()
    async with asyncio.timeout(60.0):
        granted = await nodes.reserve(node.address, REQUEST, 20)
        if is_lost:
            nodes.forget(node.address)
        nodes.release(node.address, granted.reservation_id)
        await nodes.close()
        assert node.idle != is_lost
        await node.stop()
