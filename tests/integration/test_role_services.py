"""What a tool without our schema, grpcurl say, is told by each role: its services, what they are, how they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.service import SERVICE_NAMES as COORDINATOR
from decode_node.service import SERVICE_NAMES as DECODE_NODE
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.raw import KV_TRANSFER
from kvrelay.rpc.server import add_reflection
from kvstore.main import KVStoreApp
from prefill_node.service import SERVICE_NAMES as PREFILL_NODE
from tests.support.grpc_ends import connected

PROTO = Path(__file__).resolve().parents[2] / "proto" / "kvrelay" / "pb"


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (COORDINATOR, ("kvrelay.pb.Inference", "kvrelay.pb.Cluster")),
        (PREFILL_NODE, ("kvrelay.pb.Prefill", "kvrelay.pb.Node")),
        (DECODE_NODE, ("kvrelay.pb.Decode", "kvrelay.pb.Node", KV_TRANSFER)),
        (KVStoreApp.service_names, ("kvrelay.pb.KVStore", KV_TRANSFER)),
    ],
    ids=["coordinator", "prefill-node", "decode-node", "kvstore"],
)
async def test_each_role_describes_its_services_and_their_health(
    served: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert served == expected
    readiness = Readiness(served)
    schema = [name for name in served if name != KV_TRANSFER]  # raw frames have none

    def register(server: grpc.aio.Server) -> None:
        readiness.register(server)
        add_reflection(server, served)

    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        for name in schema:
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)

    async with connected(register) as channel:
        readiness.set(True)
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *served):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, name
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())
        described = [reply async for reply in call]
    for name, reply in zip(schema, described, strict=True):
        assert reply.file_descriptor_response.file_descriptor_proto, f"{name}: {reply.error_response.error_message}"


def test_every_service_of_the_schema_is_some_roles() -> None:
    words = [
        line.split()[1]
        for path in PROTO.glob("*.proto")
        for line in path.read_text().splitlines()
        if line[:8] == "service "
    ]
    assert {f"kvrelay.pb.{name}" for name in words} == {
        *COORDINATOR,
        *PREFILL_NODE,
        *DECODE_NODE,
        *KVStoreApp.service_names,
    } - {KV_TRANSFER}
