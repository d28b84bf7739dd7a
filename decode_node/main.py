"""`kvrelay decode-node`: puts the node together, in order, and takes it apart in reverse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack

import grpc
from prometheus_client import CollectorRegistry

from decode_node.config import DecodeConfig
from decode_node.engine import DecodeCore, EngineLoad
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from decode_node.scheduler import Scheduler
from decode_node.service import SERVICE_NAMES, DecodeService
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.loop import EngineLoop
from kvrelay.kv.layout import NodeInfo
from kvrelay.kv.remote import Offloader, StoreClient
from kvrelay.metrics import BlockGauge
from kvrelay.rpc import process
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.membership import Membership
from kvrelay.types import BlockHash, InstanceId, NodeStatus, Role

HEALTH_INTERVAL_S = 0.25  # how often the engine's watchdog is asked; its own limit is far longer
LAST_WORDS_S = 0.5  # of the grace period, for requests that are dropped to hear of it before the server stops


class DecodeApp:
    """One decode node; see `kvrelay.rpc.process.App`."""

    service_names = SERVICE_NAMES

    def __init__(self, config: DecodeConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        """Raises ConfigError where settings contradict each other."""
        config.check()
        self._config = config
        self._instance_id = instance_id
        self._metrics = DecodeMetrics(registry)
        BlockGauge(registry, lambda: self._load().blocks)
        self._service = DecodeService()
        self._engine: EngineLoop[DecodeCore] = EngineLoop(self._make_core, self._deliver, watchdog_s=config.watchdog_s)
        self._loaded: LoadedEngine | None = None  # both are set on the engine thread before its start is told
        self._core: DecodeCore | None = None
        self._membership: Membership | None = None
        self._readiness = Readiness()
        self._closing = AsyncExitStack()

    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        """Loads the model, then joins the coordinator. Raises ModelFileError or ConfigError."""
        self._readiness = readiness
        self._closing.push_async_callback(self._engine.stop)
        await self._engine.start()
        assert self._loaded is not None
        node = await self._make_node(self._loaded)
        self._service.node = node
        await self._join(address, self._loaded)
        self._look_at_health()
        self._spawn(self._watch_health())

    async def drain(self, deadline_s: float) -> None:
        if self._service.node is not None:
            await self._service.node.drain(max(0.0, deadline_s - LAST_WORDS_S))

    async def close(self) -> None:
        await self._closing.aclose()

    def status(self) -> NodeStatus:
        return self._service.node.status() if self._service.node is not None else NodeStatus()

    def _make_core(self) -> DecodeCore:
        """Runs on the engine thread."""
        config = self._config
        loaded = load_engine(
            config.model,
            name=config.model_name,
            dtype=config.dtype,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
            block_tokens=config.block_tokens,
            threads=config.threads,
            device=config.device,
        )
        self._loaded = loaded
        self._core = DecodeCore(
            info=loaded.info,
            runner=loaded.runner,
            cache=loaded.cache,
            pool=loaded.pool,
            scheduler=Scheduler(config.max_batch, config.max_batched_tokens),
        )
        return self._core

    async def _make_node(self, loaded: LoadedEngine) -> DecodeNode:
        offloader = await self._make_offloader(loaded)
        node = DecodeNode(
            engine=self._engine,
            info=loaded.info,
            cache=loaded.cache,
            instance_id=self._instance_id,
            metrics=self._metrics,
            lease_s=self._config.lease_s,
            max_requests=self._config.max_requests,
            load=self._load,
            changed=self._on_changed,
            offer=offloader.offer if offloader else lambda hashes: None,
        )
        self._closing.push_async_callback(node.close)
        await node.start()
        return node

    async def _make_offloader(self, loaded: LoadedEngine) -> Offloader | None:
        if not self._config.kvstore:
            return None
        store = StoreClient(self._config.kvstore, loaded.info.layout, loaded.info.fingerprint)
        self._closing.push_async_callback(store.close)
        offloader = Offloader(store, self._read_block)
        self._closing.push_async_callback(offloader.close)
        await offloader.start()
        return offloader

    async def _join(self, address: str, loaded: LoadedEngine) -> None:
        if self._config.coordinator:
            info = NodeInfo(Role.DECODE_NODE, self._instance_id, address, loaded.info)
            self._membership = Membership(self._config.coordinator, info, self.status)
            self._closing.push_async_callback(self._membership.close)
            await self._membership.start()

    async def _read_block(self, block_hash: BlockHash) -> bytes | None:
        return await self._engine.call(lambda core: core.read_block(block_hash))

    def _load(self) -> EngineLoad:
        return self._core.load if self._core is not None else EngineLoad()

    def _deliver(self, output: object) -> None:
        if self._service.node is not None:
            self._service.node.deliver(output)

    def _on_changed(self) -> None:
        if self._membership is not None:
            self._membership.changed()

    def _spawn(self, watch: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(watch)

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._closing.push_async_callback(stop)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._look_at_health()

    def _look_at_health(self) -> None:
        was_ready = self._readiness.ready
        stuck = self._engine.stuck(time.monotonic())
        self._readiness.set(not stuck, "the engine has not finished a step for too long" if stuck else "")
        if self._readiness.ready != was_ready:
            self._on_changed()
        if self._service.node is not None:
            self._service.node.end_if_stuck()


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(DecodeConfig, Role.DECODE_NODE, DecodeApp, argv)
