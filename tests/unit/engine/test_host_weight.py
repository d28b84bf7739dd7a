"""A node reports the weight it was started with, and the one it was told."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeStatus
from kvrelay.engine.host import EngineHost
from kvrelay.role_config import NodeConfig
from kvrelay.rpc.node_service import NodeService
from kvrelay.rpc.nodes import NodeClient
from kvrelay.types import InstanceId
from tests.support.grpc_ends import connected


async def test_the_weight_is_the_settings_until_another_is_told() -> None:
    host: EngineHost[object] = EngineHost(  # type: ignore[type-var]
        NodeConfig(model=Path("m"), weight=0.5),
        InstanceId("node"),
        CollectorRegistry(),
        make_core=lambda loaded: object(),
        deliver=lambda output: None,
        status=lambda: NodeStatus(num_running=3),
        on_stuck=lambda: None,
    )
    async with connected(host.register) as channel:
        assert host.reported() == NodeStatus(num_running=3, weight=0.5)
        assert await NodeClient(channel).set_weight(4.0) == 4.0
    assert host.reported() == NodeStatus(num_running=3, weight=4.0)


async def test_a_change_is_told_at_once_and_no_change_is_not() -> None:
    told: list[float] = []
    service = NodeService(1.0, lambda: told.append(service.weight))
    async with connected(service.register) as channel:
        for weight in (4.0, 4.0, 0.0):
            await NodeClient(channel).set_weight(weight)
    assert told == [4.0, 0.0]
