"""Health for the process and each service, and the list of services by reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.rpc.calls import Replies
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.server import add_reflection
from tests.support.grpc_ends import connected

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVICES = ("kvrelay.pb.Decode", "kvrelay.pb.KVTransfer")


async def check(channel: grpc.aio.Channel, service: str) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


@pytest.mark.parametrize("service", ["", *SERVICES])
async def test_health_follows_readiness(service: str) -> None:
    readiness = Readiness(SERVICES)
    async with connected(readiness.register) as channel:
        assert await check(channel, service) == NOT_SERVING
        readiness.set(True)
        assert await check(channel, service) == SERVING
        readiness.set(False, "the engine is stuck")
        assert (await check(channel, service), readiness.reason) == (NOT_SERVING, "the engine is stuck")
        readiness.close("draining")
        readiness.set(True)
        assert (await check(channel, service), readiness.reason) == (NOT_SERVING, "draining")


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with connected(Readiness(SERVICES).register) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "kvrelay.pb.Prefill")

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("service", "seen"), [("", [NOT_SERVING, SERVING, NOT_SERVING]), ("no.such.Service", [SERVICE_UNKNOWN])]
)
async def test_a_watcher_sees_each_change_and_ends_with_the_process(service: str, seen: list[int]) -> None:
    readiness = Readiness(SERVICES)
    async with connected(readiness.register) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        async with Replies(call, lambda reply: int(reply.status)) as statuses, asyncio.timeout(30.0):
            got = [await anext(statuses)]
            readiness.set(True)
            readiness.set(True)
            got += [await anext(statuses)] if service == "" else []
            readiness.close("draining")
            got += [status async for status in statuses]

    assert got == seen


async def test_liveness_has_a_name_of_its_own_and_is_not_readiness() -> None:
    readiness = Readiness(SERVICES)
    async with connected(readiness.register) as channel:
        assert [await check(channel, name) for name in ("", "liveness")] == [NOT_SERVING, SERVING]
        request = health_pb2.HealthCheckRequest(service="liveness")
        call = health_pb2_grpc.HealthStub(channel).Watch(request)
        async with Replies(call, lambda reply: reply.status) as statuses:
            assert await anext(statuses) == SERVING
            readiness.set_alive(False, "the engine thread has ended")
            assert await anext(statuses) == NOT_SERVING
            readiness.set_alive(True)
            assert await anext(statuses) == SERVING
            readiness.close("draining")
            assert [status async for status in statuses] == []  # a watcher does not hold up the exit
        assert [await check(channel, name) for name in ("", "liveness")] == [NOT_SERVING, SERVING]
        readiness.set_alive(False, "the engine thread has ended")
        assert await check(channel, "liveness") == NOT_SERVING


async def test_waiting_for_readiness() -> None:
    readiness = Readiness()
    waiting = asyncio.create_task(readiness.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    readiness.set(True)
    await waiting
    readiness.set(False, "stuck")
    await readiness.wait_ready()


async def test_reflection_lists_the_services() -> None:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with connected(lambda server: add_reflection(server, ("kvrelay.pb.Decode",))) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())
        async with Replies(call, lambda reply: reply.list_services_response.service) as replies:
            names = [service.name for service in await anext(replies)]

    assert sorted(names) == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kvrelay.pb.Decode",
    ]
