"""What nodes are told of the tenant a request is of: by whom it was sent, whatever it says."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.identity import Context, Identity
from coordinator.tenants import Salts, Tenant
from kvrelay.inference import GenerateRequest, TextPrompt
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.messages import NodeRequest
from kvrelay.pb import inference_pb2, inference_pb2_grpc, types_pb2
from kvrelay.rpc.channel import open_channel
from tests.support.answers import Answer
from tests.support.coordinator_ends import Ends, ends, greedy
from tests.support.fake_nodes import MODEL

PROMPT = TextPrompt("0123456789" * 10)  # 6 full blocks of 16 tokens
DEFAULT_SALT = Salts().scope(Tenant(), GenerateRequest(PROMPT)).salt


class Callers:
    """Stands for authentication: everybody is who the test says."""

    def __init__(self) -> None:
        self.caller = Tenant()

    def identify(self, context: Context) -> Identity:
        return Identity(self.caller)


async def ask(cluster: Ends, **cache: Any) -> tuple[NodeRequest, Answer]:
    """What the nodes got, and the answer. Every node of the attempt got the same."""
    answer = await cluster.ask(PROMPT, greedy(max_tokens=2), **cache)
    request = cluster.decode[0].requests[-1]
    assert cluster.prefill[0].requests[-1] == request
    return request, answer


async def test_nodes_learn_the_tenant_and_its_salt_from_the_identity_alone() -> None:
    callers = Callers()
    async with ends(identify=callers.identify) as cluster:
        callers.caller = Tenant("acme")
        acme, _ = await ask(cluster)
        own, _ = await ask(cluster, cache_salt="mine")
        public, _ = await ask(cluster, public_cache="docs")
        callers.caller = Tenant("umbrella")
        other, _ = await ask(cluster)
        guessed, _ = await ask(cluster, cache_salt="mine")
        shared, _ = await ask(cluster, public_cache="docs")
    assert [request.tenant for request in (acme, own, public)] == ["acme"] * 3
    assert [request.tenant for request in (other, guessed, shared)] == ["umbrella"] * 3
    assert len({request.tenant_salt for request in (acme, own, public, other, guessed)}) == 5
    assert shared.tenant_salt == public.tenant_salt


async def test_nothing_that_a_client_writes_makes_it_another_tenant() -> None:
    """vllm#16016, sglang#9163: what names a tenant must not be the client's to choose."""
    metadata = (("tenant", "acme"), ("x-tenant", "acme"), ("authorization", "Bearer acme"), ("user", "acme"))
    sampling = types_pb2.SamplingParams(max_tokens=2)
    async with ends() as cluster, open_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        ids = ("acme", "default/acme", "one")
        for request_id in ids:
            request = inference_pb2.GenerateRequest(text=PROMPT.text, request_id=request_id, sampling=sampling)
            async for _ in stub.Generate(request, metadata=metadata):
                pass
        requests = cluster.decode[0].requests
    assert len(requests) == len(ids)
    assert {(request.tenant, request.tenant_salt) for request in requests} == {("default", DEFAULT_SALT)}


async def test_nobody_is_anyone_but_the_default_tenant_yet() -> None:
    async with ends() as cluster:
        request, _ = await ask(cluster)
        salted, _ = await ask(cluster, cache_salt="acme")
    assert request.tenant == salted.tenant == "default"
    assert len(request.tenant_salt) == 32, "private to the default tenant"
    assert salted.tenant_salt != request.tenant_salt


@pytest.mark.parametrize("ttl_s", [None, 0.0, 300.0])
async def test_nodes_learn_how_long_a_store_keeps_the_prompts_blocks(ttl_s: float | None) -> None:
    async with ends() as cluster:
        request, _ = await ask(cluster, cache_ttl_s=ttl_s)
    assert request.cache_ttl_s == ttl_s


async def test_the_account_names_the_prompts_prefix_as_nodes_and_stores_do() -> None:
    async with ends() as cluster:
        request, answer = await ask(cluster, cache_salt="mine")
        short = await cluster.ask(TextPrompt("hello"), greedy(max_tokens=2))
    root = chain_root(MODEL.fingerprint, MODEL.layout.fingerprint, request.tenant_salt)
    assert answer.finished.prefix_hash == block_hashes(root, request.token_ids, 16)[5]
    assert short.finished.prefix_hash == b"", "no block of it is full"


async def test_one_prefill_alone_has_an_account_of_its_prefix_too() -> None:
    async with ends() as cluster:
        answer = await cluster.ask(PROMPT, greedy(max_tokens=1))
    assert len(answer.finished.prefix_hash) == 32
