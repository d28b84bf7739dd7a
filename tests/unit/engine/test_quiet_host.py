"""Offloading hears from a node's own status whether it may work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeStatus
from kvrelay.engine.host import EngineHost
from kvrelay.kv.quiet import Quiet
from kvrelay.role_config import NodeConfig
from kvrelay.types import InstanceId


async def test_a_node_is_quiet_while_no_request_runs() -> None:
    statuses = [NodeStatus(num_running=0)]
    host: EngineHost[object] = EngineHost(  # type: ignore[type-var]
        NodeConfig(model=Path("m")),
        InstanceId("node"),
        CollectorRegistry(),
        make_core=lambda loaded: object(),
        deliver=lambda output: None,
        status=lambda: statuses[-1],
        on_stuck=lambda: None,
    )
    statuses.append(NodeStatus(num_running=1))
    host.changed()
    waiting = asyncio.create_task(host._quiet.wait(3_600.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    statuses.append(NodeStatus(num_running=0))
    host.changed()
    await asyncio.wait_for(waiting, 60.0)


async def test_quiet_is_waited_for_no_longer_than_one_likes() -> None:
    quiet = Quiet()
    quiet.set(False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await quiet.wait(3_600.0)
    await quiet.wait(0.01)
