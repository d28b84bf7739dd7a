"""Nodes join a coordinator, fall silent, restart and leave, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc, types_pb2
from kvrelay.rpc import convert_cluster
from kvrelay.rpc.memberships import Memberships
from kvrelay.types import InstanceId, Role
from tests.support.coordinator_ends import TIMEOUT_S, ends
from tests.support.fake_nodes import ANSWER_IDS, MODEL, FakeDecodeNode, FakePrefillNode, other_model


def joined(**changes: object) -> cluster_pb2.NodeEvent:
    info = NodeInfo(Role.DECODE_NODE, InstanceId("stranger"), "127.0.0.1:9", other_model(**changes))
    return cluster_pb2.NodeEvent(joined=convert_cluster.node_info_to_pb(info))


async def refusal(address: str, *events: cluster_pb2.NodeEvent) -> tuple[grpc.StatusCode, types_pb2.Error]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = cluster_pb2_grpc.ClusterStub(channel).Join(iter(events), timeout=60.0)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in call:
                pass
    error = types_pb2.Error.FromString(dict(failed.value.trailing_metadata() or ())["kvrelay-error-bin"])
    return failed.value.code(), error


async def test_foreign_model_is_refused_and_told_why() -> None:
    async with ends() as cluster:
        code, error = await refusal(cluster.address, joined(fingerprint="00" * 32))
        assert (code, error.code) == (grpc.StatusCode.FAILED_PRECONDITION, "foreign_block")
        assert f"model fingerprint {'00' * 32}, but this cluster's is {MODEL.fingerprint}" in error.message
        assert len((await cluster.client.status()).nodes) == 2


async def test_a_coordinator_that_is_named_twice_is_joined_once(caplog: pytest.LogCaptureFixture) -> None:
    async with ends() as cluster:
        addresses = (cluster.address, cluster.address.replace("127.0.0.1", "localhost"))
        info = NodeInfo(Role.DECODE_NODE, InstanceId("newcomer"), "127.0.0.1:9", MODEL)
        num_sent = 0

        def status() -> NodeStatus:
            nonlocal num_sent
            num_sent += 1
            return NodeStatus(ready=True)

        memberships = Memberships(addresses, info, status, interval_s=0.01)
        await memberships.start()
        async with asyncio.timeout(TIMEOUT_S):
            while "lead to the same coordinator" not in caplog.text:
                await asyncio.sleep(0.01)
            await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 3)
            num_before = num_sent
            while num_sent < num_before + 20:
                await asyncio.sleep(0.01)
        assert [record.levelname for record in caplog.records if "the same coord" in record.message] == ["ERROR"]
        assert caplog.text.count("refuses this node") <= 1, "pushed out once, before it was known"
        await memberships.close()


async def test_stream_that_is_no_join() -> None:
    async with ends() as cluster:
        status = cluster_pb2.NodeEvent(status=cluster_pb2.NodeStatus(ready=True))
        for events in ([status], [joined(), joined()], [cluster_pb2.NodeEvent()]):
            code, error = await refusal(cluster.address, *events)
            assert (code, error.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
            assert "one NodeJoined, then NodeStatus" in error.message


async def test_readiness_follows_the_nodes() -> None:
    async with ends(member_timeout_s=2.0) as cluster:
        assert cluster.readiness.ready
        cluster.decode[0].ready = False
        cluster.decode[0].tell()
        await cluster.until_status(lambda status: not status.ready)
        assert not cluster.readiness.ready
        assert cluster.readiness.reason == "no decode-node is ready"
        cluster.decode[0].ready = True
        cluster.decode[0].tell()
        await cluster.until_status(lambda status: status.ready)
        await cluster.decode[0].stop()
        await cluster.until_status(lambda status: len(status.nodes) == 1)
        assert not cluster.readiness.ready


async def test_node_that_only_lost_its_stream_keeps_its_work() -> None:
    async with ends() as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await node.until_reached("token")
        await node.join_again()
        node.at["token"].let_go()
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 0


async def test_restarted_node_replaces_its_past_at_once() -> None:
    async with ends(num_decode=1) as cluster:
        old = cluster.decode[0]
        old.at["token"].hold()
        asked = asyncio.create_task(cluster.ask())
        await old.until_reached("token")
        port = int(old.address.rpartition(":")[2])
        await old.stop()
        new = FakeDecodeNode("decode-again")
        cluster.decode[:] = [new]
        await new.start(cluster.address, port=port)
        outcome = await asked
        assert outcome.token_ids == ANSWER_IDS
        assert outcome.finished.retries == 1
        assert [report.info.instance_id for report in (await cluster.client.status()).nodes if report.status.ready] == [
            "prefill-1",
            "decode-again",
        ]


async def test_a_node_restarted_with_other_weights_is_served_at_once() -> None:
    """The first of the two that were stopped is refused only while the other still serves the old ones."""
    async with ends(member_timeout_s=60.0) as cluster:
        ports = [int(node.address.rpartition(":")[2]) for node in cluster.nodes]
        for node in cluster.nodes:
            await node.stop()
        decode = FakeDecodeNode("decode-again")
        prefill = FakePrefillNode([decode], "prefill-again")
        cluster.prefill[:], cluster.decode[:] = [prefill], [decode]
        for node in cluster.nodes:
            node.model = other_model(fingerprint="aa" * 32)
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for node, port in zip(cluster.nodes, ports, strict=True):
                group.create_task(node.start(cluster.address, port=port))
        await cluster.until_status(lambda status: status.ready)
        assert (await cluster.ask()).token_ids == ANSWER_IDS
        assert (await cluster.client.get_model()).fingerprint == "aa" * 32


async def test_status_tells_of_every_node() -> None:
    async with ends(num_prefill=2, num_decode=1) as cluster:
        status = await cluster.client.status()
        assert status.ready
        assert [(report.info.role, report.info.address) for report in status.nodes] == [
            (node.role, node.address) for node in cluster.nodes
        ]
        assert status.nodes[2].status.blocks.total == 32
        assert all(0 <= report.age_s < 3 for report in status.nodes)
