"""What `kvrelay status` prints."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from kvrelay import status
from kvrelay.cluster import ClusterStatus, ModelInfo, NodeInfo, NodeReport, NodeStatus
from kvrelay.types import BlockCounts, InstanceId, Role
from tests.support.coordinator_ends import TIMEOUT_S, ends
from tests.support.fake_nodes import MODEL


def test_status_table() -> None:
    def report(role: Role, port: int, node_status: NodeStatus) -> NodeReport:
        return NodeReport(NodeInfo(role, InstanceId("i"), f"127.0.0.1:{port}", None), node_status, 0.1)

    blocks = BlockCounts(total=30, free=20, reserved=1, held=2, cached=7)
    nodes = (
        report(Role.KVSTORE, 7401, NodeStatus(ready=True, memory_bytes=2**20, disk_bytes=0)),
        report(Role.DECODE_NODE, 7420, NodeStatus(ready=True, blocks=blocks, num_running=3, num_reservations=1)),
    )
    assert status.table("127.0.0.1:7400", ClusterStatus(nodes, 2, 3, ready=True)).splitlines() == [
        "coordinator 127.0.0.1:7400: ready, 3 running, 2 queued",
        "ROLE         ADDRESS         STATE  RUNNING  WAITING  RESERVED  BLOCKS free/reserved/held/cached  TOTAL",
        "decode-node  127.0.0.1:7420  ready  3        0        1         20/1/2/7                          30",
        "kvstore      127.0.0.1:7401  ready  -        -        -         memory 1.0 MiB, disk 0 B          -",
    ]


def test_the_table_says_why_a_node_is_not_ready() -> None:
    """One that drains says so already."""
    members = [
        NodeReport(NodeInfo(Role.PREFILL_NODE, InstanceId("i"), f"127.0.0.1:{7410 + i}", None), node_status, 0.1)
        for i, node_status in enumerate(
            [
                NodeStatus(not_ready_reason="the engine is stuck"),
                NodeStatus(ready=True),
                NodeStatus(draining=True, not_ready_reason="draining"),
            ]
        )
    ]
    cluster = ClusterStatus(tuple(members), 0, 0, ready=False)
    _, header, stuck, ready, draining = status.table("c", cluster).splitlines()
    assert header.endswith("TOTAL  WHY NOT READY")
    assert stuck.split()[2:4] == ["not", "ready"]
    assert stuck.index("the engine is stuck") == header.index("WHY NOT READY")
    assert ready.endswith("  -")
    assert draining.endswith("  -")
    assert status.describe(cluster)["nodes"][0]["not_ready_reason"] == "the engine is stuck"


def test_models_and_weights_are_shown_where_they_differ() -> None:
    def report(role: Role, port: int, model: ModelInfo | None, weight: float) -> NodeReport:
        info = NodeInfo(role, InstanceId("i"), f"127.0.0.1:{port}", model)
        return NodeReport(info, NodeStatus(ready=True, weight=weight), 0.1)

    nodes = (
        report(Role.PREFILL_NODE, 7410, MODEL, 1.0),
        report(Role.DECODE_NODE, 7420, replace(MODEL, name="large"), 0.0),
        report(Role.KVSTORE, 7401, None, 1.0),
    )
    _, header, prefill, decode, store = status.table("c", ClusterStatus(nodes, 0, 0, ready=True)).splitlines()
    assert header.split()[:4] == ["ROLE", "ADDRESS", "MODEL", "STATE"]
    assert header.split()[-1] == "WEIGHT"
    assert [line.split()[2] for line in (prefill, decode, store)] == ["bytes", "large", "-"]
    assert [line.split()[-1] for line in (prefill, decode, store)] == ["1", "0", "-"]


def test_nodes_are_listed_by_role_then_address_however_they_joined() -> None:
    places = [
        (Role.KVSTORE, "127.0.0.1:7401"),
        (Role.DECODE_NODE, "127.0.0.1:10020"),
        (Role.DECODE_NODE, "127.0.0.1:7420"),
        (Role.PREFILL_NODE, "127.0.0.2:7410"),
        (Role.PREFILL_NODE, "127.0.0.1:7411"),
    ]
    nodes = tuple(NodeReport(NodeInfo(role, InstanceId("i"), at, None), NodeStatus(), 0.1) for role, at in places)
    expected = ["127.0.0.1:7411", "127.0.0.2:7410", "127.0.0.1:7420", "127.0.0.1:10020", "127.0.0.1:7401"]

    cluster = ClusterStatus(nodes, 0, 0, ready=True)
    assert [node["address"] for node in status.describe(cluster)["nodes"]] == expected
    assert [line.split()[1] for line in status.table("c", cluster).splitlines()[2:]] == expected


async def test_against_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        address = ["--address", cluster.address]
        assert await asyncio.to_thread(status.main, address) == 0
        assert "decode-node" in capsys.readouterr().out
        assert await asyncio.to_thread(status.main, ["--json", *address]) == 0
        assert json.loads(capsys.readouterr().out)["nodes"][0]["role"] == "prefill-node"


@pytest.mark.parametrize("pause", ["0", "nan", "inf", "-1", "soon"])
def test_a_pause_that_makes_no_sense_is_refused(pause: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        status.main([f"--watch={pause}"])
    assert caught.value.code == 2
    assert f"{pause!r} is no pause; give seconds, 0.1 at least" in capsys.readouterr().err


async def test_watching_goes_on_while_the_coordinator_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    async def until(count: int, what: str, out: list[str]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while sum(text.count(what) for text in out) < count:
                await asyncio.sleep(0.01)
                out += capsys.readouterr()

    seen: list[str] = []
    async with ends() as cluster:
        options = status.parser().parse_args(["--watch", "0.1", "--address", cluster.address])
        watching = asyncio.create_task(status._status(options))
        await until(2, "ready, 0 running", seen)
    await until(1, f"kvrelay status: no coordinator answers at {cluster.address}", seen)
    watching.cancel()
    await asyncio.wait([watching])
