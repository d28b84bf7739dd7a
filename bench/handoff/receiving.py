"""A decode node that receives KV, with a model that decodes or without one: the product's own classes, no role around.

Its server serves what a decode node's does, and a stream of ticks that stands for a token stream.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.handoff.shapes import info_of
from decode_node.engine import DecodeCore, StepDone
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from decode_node.scheduler import Scheduler
from decode_node.service import SERVICE_NAMES, DecodeService
from kvrelay.cluster import ModelInfo
from kvrelay.engine.batch import Batch
from kvrelay.engine.load import load_engine
from kvrelay.engine.loop import EngineLoop
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.pool import BlockPool
from kvrelay.limits import DecodeLimits
from kvrelay.rpc.credentials import MutualTLS
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.raw import raw_methods
from kvrelay.rpc.server import bind, make_server
from kvrelay.sampling import GeneratedToken
from kvrelay.types import InstanceId

TICKS = "bench.Ticks"
TICK_S = 0.010
TICK = b"a token or so..."
LEASE_S = 60.0
MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class NodeSetting:
    """`num_blocks` are the pool's. With `model` it decodes, on `engine_cpus` alone if there are some. `memory`
    holds the cache, where it is given."""

    shape: str
    num_blocks: int
    model: Path | None = None
    engine_cpus: tuple[int, ...] = ()
    num_extra_blocks: int = 0  # of the cache, behind the pool's: another process hands them out
    memory: mmap.mmap | None = None


class TimedCore(DecodeCore):
    """Remembers when each step ended and how many sequences it gave a token to."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.steps: list[tuple[float, int]] = []

    def step(self) -> StepDone:
        done = super().step()
        self.steps.append((time.perf_counter(), done.num_rows))
        return done


class NoModel:
    """A runner for a node that is never asked to decode."""

    def run(self, batch: Batch) -> list[GeneratedToken]:
        raise AssertionError("this node only receives")


@dataclass(slots=True)
class Received:
    node: DecodeNode
    core: TimedCore


@asynccontextmanager
async def decode_node(setting: NodeSetting) -> AsyncIterator[Received]:
    """Runs one as long as the block."""
    made: list[Received] = []
    limits = DecodeLimits(max_batch=MAX_REQUESTS, max_batched_tokens=512, max_requests=MAX_REQUESTS)

    def make_core() -> TimedCore:
        """Runs on the engine thread."""
        if setting.engine_cpus:
            os.sched_setaffinity(0, setting.engine_cpus)
        core, node.cache, node.info = _make_core(setting, limits)
        made.append(Received(node, core))
        return core

    engine: EngineLoop[DecodeCore] = EngineLoop(make_core, lambda output: node.deliver(output), watchdog_s=60.0)
    info = info_of(setting.shape)
    node = DecodeNode(
        engine=engine,
        info=info,
        cache=None,  # type: ignore[arg-type]  # the engine thread makes it
        instance_id=InstanceId("receiver"),
        metrics=DecodeMetrics(CollectorRegistry()),
        limits=limits,
        lease_s=LEASE_S,
        load=lambda: made[0].core.load,
    )
    await engine.start()
    await node.start()
    try:
        yield made[0]
    finally:
        await node.close()
        await engine.stop()


def _make_core(setting: NodeSetting, limits: DecodeLimits) -> tuple[TimedCore, PagedKVCache, ModelInfo]:
    num_blocks = setting.num_blocks + setting.num_extra_blocks
    if setting.model is None:
        info, runner = info_of(setting.shape), NoModel()
        cache = PagedKVCache(info.layout, num_blocks, memory=setting.memory)
    else:
        loaded = load_engine(setting.model, num_blocks=num_blocks, threads=1, memory=setting.memory)
        info, runner, cache = loaded.info, loaded.runner, loaded.cache
    core = TimedCore(
        info=info, runner=runner, cache=cache, pool=BlockPool(setting.num_blocks), scheduler=Scheduler(limits)
    )
    return core, cache, info


@asynccontextmanager
async def serving(node: DecodeNode, tls: MutualTLS | None) -> AsyncIterator[int]:
    """The port of its server, stopped with the block."""
    service, server, readiness = DecodeService(), make_server(), Readiness(SERVICE_NAMES)
    service.node = node
    service.register(server)
    readiness.register(server)
    readiness.set(True)
    server.add_generic_rpc_handlers((raw_methods(TICKS, unary_stream={"Tick": _ticks}),))
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def _ticks(request: bytes, context: object) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        yield TICK
        due += TICK_S
        await asyncio.sleep(due - loop.time())
