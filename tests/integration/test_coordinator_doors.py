"""The gRPC door where callers are known: who gets in, to what, and that nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from coordinator.api_keys import new_key
from coordinator.doors import limits_of_clients
from coordinator.identity import Scope
from kvrelay.certificates import make_certificates
from kvrelay.client import AsyncClient
from kvrelay.errors import (
    KVRelayError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvrelay.pb import cluster_pb2, decode_pb2, inference_pb2, kvstore_pb2, prefill_pb2
from kvrelay.rpc.channel import error_from_rpc
from tests.support.answers import collect
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy, long_prompt

INFER, ADMIN = frozenset({Scope.INFER}), frozenset({Scope.ADMIN})
ALL_FILES = (inference_pb2, cluster_pb2, decode_pb2, prefill_pb2, kvstore_pb2, vllm_engine_pb2)
EVERY_METHOD = sorted(
    f"/{service.full_name}/{method.name}"
    for file in ALL_FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
REFLECTION = (
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
CLIENTS_SERVICES = ("/kvrelay.pb.Inference/", "/vllm.grpc.engine.VllmEngine/", "/kvrelay.pb.Cluster/GetStatus")
PEER_FILES = {"ca": "ca.pem", "cert": "coordinator.pem", "key": "coordinator.key"}


class Keys:
    """Of two tenants and of an operator, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acme, acme = new_key("acme", "acme-1", INFER, max_open=2)
        self.umbrella, umbrella = new_key("umbrella", "umbrella-1", INFER)
        self.operator, operator = new_key("ops", "ops-1", frozenset(Scope))
        self.watcher, watcher = new_key("ops", "ops-2", ADMIN)
        path.write_text("\n".join((acme, umbrella, operator, watcher)))


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.toml")


@asynccontextmanager
async def guarded(keys: Keys, **settings: Any) -> AsyncIterator[Ends]:
    async with ends(api_keys_file=str(keys.path), cluster_port=0, api_key=keys.operator, **settings) as cluster:
        yield cluster


async def refusal(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str]) -> type[KVRelayError]:
    """As a unary call, whatever kind the method is: a server that reads nothing does not mind."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await channel.unary_unary(method)(b"", metadata=metadata, timeout=TIMEOUT_S)
    return type(error_from_rpc(refused.value))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "bearer {}",
        "BEARER {}",
        "Basic {}",
        "{}",
        "Bearer  {}",
        "Bearer {}x",
    ],
)
async def test_nobody_unknown_is_answered(keys: Keys, header: str | None) -> None:
    """Of every method there is, and of some that there are not."""
    metadata = () if header is None else (("authorization", header.format(keys.operator)),)
    paths = (*EVERY_METHOD, *REFLECTION, "//kvrelay.pb.Inference/Generate", "/kvrelay.pb.inference/Generate", "/a/b")
    async with guarded(keys) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        answers = {path: await refusal(channel, path, *metadata) for path in paths}
    assert answers.pop("/kvrelay.pb.Cluster/Join") is PermissionDeniedError
    assert set(answers.values()) == {UnauthenticatedError}


def test_every_call_that_serves_clients_is_bounded_in_bytes_and_time() -> None:
    """Answers in time by a setting."""
    served = [path for path in EVERY_METHOD if path.startswith(CLIENTS_SERVICES)]
    unbounded = {path for path in served if not limits_of_clients(path).max_s}
    assert unbounded == {"/kvrelay.pb.Inference/Generate", "/vllm.grpc.engine.VllmEngine/Generate"}
    large = {path.rpartition("/")[2] for path in served if limits_of_clients(path).max_bytes > 65_536}
    assert large == {"Generate", "Tokenize", "Detokenize"}
    assert all(limits_of_clients(path).max_bytes for path in served)


async def test_health_answers_everyone(keys: Keys) -> None:
    async with guarded(keys) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_two_headers_are_one_too_many(keys: Keys) -> None:
    header = ("authorization", f"Bearer {keys.operator}")
    async with guarded(keys) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        assert await refusal(channel, "/kvrelay.pb.Inference/ListModels", header, header) is UnauthenticatedError


async def test_each_scope_opens_what_it_names_and_no_more(keys: Keys) -> None:
    async with (
        guarded(keys) as cluster,
        AsyncClient(cluster.address, api_key=keys.acme) as acme,
        AsyncClient(cluster.address, api_key=keys.watcher) as watcher,
    ):
        assert (await collect(acme.generate(long_prompt(), greedy(max_tokens=2)))).token_ids
        with pytest.raises(PermissionDeniedError, match="needs the scope admin; acme-1 has infer"):
            await acme.status()
        assert len((await watcher.status()).nodes) == 2
        with pytest.raises(PermissionDeniedError, match="needs the scope infer; ops-2 has admin"):
            await watcher.list_models()


async def test_even_an_operator_is_no_node(keys: Keys) -> None:
    header = ("authorization", f"Bearer {keys.operator}")
    async with (
        guarded(keys) as cluster,
        grpc.aio.insecure_channel(cluster.address) as clients,
        grpc.aio.insecure_channel(cluster.cluster_address) as nodes,
    ):
        assert await refusal(clients, "/kvrelay.pb.Cluster/Join", header) is PermissionDeniedError
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nodes.unary_unary("/kvrelay.pb.Inference/ListModels")(b"", metadata=(header,), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_tenant_can_neither_see_nor_end_what_is_anothers(keys: Keys) -> None:
    async with (
        guarded(keys) as cluster,
        AsyncClient(cluster.address, api_key=keys.acme) as acme,
        AsyncClient(cluster.address, api_key=keys.umbrella) as umbrella,
    ):
        answer = await collect(acme.generate(long_prompt(), greedy(max_tokens=2), request_id="mine", keep_s=60))
        assert answer.token_ids
        assert (await acme.explain("mine")).tenant == "acme"
        with pytest.raises(NotFoundError):
            await umbrella.explain("mine")
        with pytest.raises(NotFoundError):
            await umbrella.cancel("mine")
        await acme.cancel("mine")


async def test_what_is_cached_of_one_tenant_is_not_found_by_another(keys: Keys) -> None:
    async with (
        guarded(keys) as cluster,
        AsyncClient(cluster.address, api_key=keys.acme) as acme,
        AsyncClient(cluster.address, api_key=keys.umbrella) as umbrella,
    ):
        for client in (acme, umbrella):
            await collect(client.generate(long_prompt(), greedy(max_tokens=2)))
        salts = [request.tenant_salt for request in cluster.prefill[0].requests]
    assert len(set(salts)) == 2


async def test_a_key_has_no_more_answers_open_than_it_may(keys: Keys) -> None:
    async with guarded(keys) as cluster, AsyncClient(cluster.address, api_key=keys.acme) as acme:
        cluster.decode[0].at["token"].hold()
        asked = [asyncio.create_task(collect(acme.generate(long_prompt(), greedy(max_tokens=4)))) for _ in range(2)]
        await cluster.until_status(lambda status: status.num_running + status.num_queued == 2)
        with pytest.raises(
            OverloadedError, match="key 'acme-1' has 2 answers open and asks for 1 more; its max_open is 2"
        ):
            await collect(acme.generate(long_prompt(), greedy(max_tokens=4)))
        cluster.decode[0].at["token"].let_go()
        assert [len(answer.token_ids) for answer in await asyncio.gather(*asked)] == [4, 4]
        assert (await collect(acme.generate(long_prompt(), greedy(max_tokens=4), n=2))).token_ids
        with pytest.raises(OverloadedError, match="0 answers open and asks for 3 more"):
            await collect(acme.generate(long_prompt(), greedy(max_tokens=4), n=3))


async def test_so_has_a_tenant_over_all_of_its_keys(keys: Keys) -> None:
    other, line = new_key("umbrella", "umbrella-2", INFER)
    keys.path.write_text(f"{keys.path.read_text()}\n{line}")
    async with (
        guarded(keys, tenants="umbrella:max_open=1") as cluster,
        AsyncClient(cluster.address, api_key=keys.umbrella) as first,
        AsyncClient(cluster.address, api_key=other) as second,
    ):
        cluster.decode[0].at["token"].hold()
        asked = asyncio.create_task(collect(first.generate(long_prompt(), greedy(max_tokens=4))))
        await cluster.until_status(lambda status: status.num_running + status.num_queued == 1)
        with pytest.raises(OverloadedError, match="tenant 'umbrella' has 1 answers open"):
            await collect(second.generate(long_prompt(), greedy(max_tokens=4)))
        cluster.decode[0].at["token"].let_go()
        assert (await asked).token_ids


async def test_a_gateway_of_vllms_protocol_needs_a_key_to_infer_and_no_more(keys: Keys) -> None:
    async with guarded(keys) as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = vllm_engine_pb2.GetModelInfoRequest()
        named = await stub.GetModelInfo(request, metadata=(("authorization", f"Bearer {keys.acme}"),))
        assert named.served_model_name == "bytes"
        path = "/vllm.grpc.engine.VllmEngine/GetModelInfo"
        assert await refusal(channel, path, ("authorization", f"Bearer {keys.watcher}")) is PermissionDeniedError


async def test_with_certificates_clients_and_nodes_are_served_and_others_are_not(keys: Keys, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    peer = {f"peer_{what}": str(tmp_path / name) for what, name in PEER_FILES.items()}
    door = {"tls_cert": str(tmp_path / "door.pem"), "tls_key": str(tmp_path / "door.key")}
    async with guarded(keys, ca=tmp_path / "ca.pem", **peer, **door) as cluster:
        assert len((await cluster.ask(sampling=greedy(max_tokens=2))).token_ids) == 2
        for address in (cluster.address, cluster.cluster_address, cluster.decode[0].address):
            async with AsyncClient(address, api_key=keys.operator, ca="") as in_the_clear:
                with pytest.raises(UnavailableError):
                    await in_the_clear.status()
        for address in (cluster.cluster_address, cluster.decode[0].address):
            async with AsyncClient(address, api_key=keys.operator, ca=tmp_path / "ca.pem") as client:
                with pytest.raises(UnavailableError):
                    await client.status()
