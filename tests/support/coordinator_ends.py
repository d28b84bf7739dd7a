"""A coordinator and fake nodes in one event loop, joined over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.config import CoordinatorConfig
from coordinator.identity import Identify, identify
from coordinator.main import Coordinator
from kvrelay.client import AsyncClient
from kvrelay.cluster import ClusterStatus
from kvrelay.inference import Prompt, TextPrompt
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.server import add_reflection, bind
from kvrelay.sampling import SamplingParams
from kvrelay.types import InstanceId
from tests.support.answers import Answer, collect
from tests.support.byte_tokenizer import make_byte_tokenizer
from tests.support.fake_nodes import FakeDecodeNode, FakeNode, FakePrefillNode

TIMEOUT_S = 60.0  # of anything that a test waits for, on a machine that is busy with much else


@cache
def tokenizer_path() -> Path:
    return make_byte_tokenizer(Path(mkdtemp(prefix="kvrelay-test-")) / "bytes")


@dataclass(slots=True)
class Ends:
    app: Coordinator
    address: str  # of its clients' door
    cluster_address: str  # of its nodes' door, which may be the same
    registry: CollectorRegistry
    readiness: Readiness
    client: AsyncClient
    prefill: list[FakePrefillNode]
    decode: list[FakeDecodeNode]

    @property
    def nodes(self) -> list[FakeNode]:
        return [*self.prefill, *self.decode]

    async def ask(self, prompt: Prompt | None = None, sampling: SamplingParams | None = None, **kwargs: Any) -> Answer:
        events = self.client.generate(prompt or long_prompt(), sampling or greedy(), **kwargs)
        return await asyncio.wait_for(collect(events), TIMEOUT_S)

    async def check_idle(self) -> None:
        """Nothing runs or waits anywhere, now or as soon as cancels have travelled."""
        async with asyncio.timeout(TIMEOUT_S):
            for node in self.nodes:
                await node.until(lambda node=node: node.idle)  # type: ignore[misc]
            await self.until_status(lambda status: status.num_queued == status.num_running == 0)
        assert self.app.door.num_open == 0
        assert self.metric("kvrelay_requests_running") == 0
        assert self.metric("kvrelay_requests_waiting") == 0

    async def until_status(self, condition: Callable[[ClusterStatus], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(await self.client.status()):
                pass

    async def until_queued(self, num_queued: int) -> None:
        await self.until_status(lambda status: status.num_queued == num_queued)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@dataclass(frozen=True, slots=True)
class Caller:
    """What the client of a cluster's ends shows, and asks to be shown."""

    api_key: str
    ca: str | Path


@asynccontextmanager
async def ends(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    blocks: int = 32,
    identify: Identify = identify,
    api_key: str = "",
    ca: str | Path = "",
    **settings: Any,
) -> AsyncIterator[Ends]:
    """Ready to be asked. At the end everything must be idle, unless the body failed."""
    async with several_ends(
        1, num_prefill, num_decode, blocks=blocks, identify=identify, api_key=api_key, ca=ca, **settings
    ) as (ours,):
        yield ours


@asynccontextmanager
async def several_ends(
    num_coordinators: int,
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    blocks: int = 32,
    identify: Identify = identify,
    api_key: str = "",
    ca: str | Path = "",
    **settings: Any,
) -> AsyncIterator[list[Ends]]:
    """Several coordinators of the same nodes, which have the coordinators' own certificates where these have any."""
    decode = [FakeDecodeNode(f"decode-{number}", blocks) for number in range(1, num_decode + 1)]
    prefill = [FakePrefillNode(decode, f"prefill-{number}") for number in range(1, num_prefill + 1)]
    async with AsyncExitStack() as closing:
        ours = [
            await closing.enter_async_context(
                _coordinator(f"coordinator-{number}", prefill, decode, settings, identify, Caller(api_key, ca))
            )
            for number in range(1, num_coordinators + 1)
        ]
        closing.push_async_callback(_stop_nodes, ours[0])
        for node in ours[0].nodes:
            node.tls = ours[0].app.peer_tls
            await node.start(*(one.cluster_address for one in ours))
        for one in ours:
            await one.until_status(lambda status: _num_ready(status) == num_prefill + num_decode)
        yield ours
        for one in ours:
            await one.check_idle()


@asynccontextmanager
async def _coordinator(
    instance_id: str,
    prefill: list[FakePrefillNode],
    decode: list[FakeDecodeNode],
    settings: dict[str, Any],
    identify: Identify,
    caller: Caller,
) -> AsyncIterator[Ends]:
    defaults = {"http_port": -1, "member_timeout_s": TIMEOUT_S}  # nodes are silent for seconds on a busy machine
    config = CoordinatorConfig(model=tokenizer_path(), model_name="bytes", **defaults | settings)
    registry = CollectorRegistry()
    app = Coordinator(config, InstanceId(instance_id), registry, identify)
    readiness = Readiness(app.service_names)
    async with AsyncExitStack() as closing:
        addresses = [await closing.enter_async_context(_opened(door, readiness)) for door in app.doors]
        address = addresses[0]
        await app.start(address, readiness)
        closing.push_async_callback(app.close)
        client = await closing.enter_async_context(AsyncClient(address, api_key=caller.api_key, ca=caller.ca))
        yield Ends(app, address, addresses[-1], registry, readiness, client, prefill, decode)


@asynccontextmanager
async def _opened(door: Door, readiness: Readiness) -> AsyncIterator[str]:
    """Its address, on a port of its own."""
    server = door.make_server()
    readiness.register(server)
    add_reflection(server, door.service_names)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, door.tls)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def _stop_nodes(cluster: Ends) -> None:
    """Those that are there at the end: a test may have put others in."""
    for node in cluster.nodes:
        await node.stop()


def _num_ready(status: ClusterStatus) -> int:
    return sum(report.status.ready for report in status.nodes)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **changes})


def long_prompt() -> TextPrompt:
    """100 tokens: 6 full blocks of 16 and 4 more."""
    return TextPrompt("0123456789" * 10)
