"""`kvrelay prefill-node`: puts the node together, in order, and takes it apart in reverse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.loop import EngineLoop
from kvrelay.kv.layout import ModelInfo, NodeInfo
from kvrelay.kv.remote import Offloader, StoreClient
from kvrelay.rpc import process
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.membership import Membership
from kvrelay.types import BlockCounts, BlockHash, InstanceId, NodeStatus, Role
from prefill_node.config import PrefillConfig
from prefill_node.engine import PrefillCore, PrefillOutput
from prefill_node.jobs import KVAccess, PrefillJobs
from prefill_node.links import DecodeLinks
from prefill_node.metrics import PrefillMetrics
from prefill_node.scheduler import PrefillScheduler
from prefill_node.service import PrefillService

HEALTH_INTERVAL_S = 0.25  # how often the watchdog looks at the engine; the watchdog's own limit is far longer
OFFLOAD_BLOCKS = 32  # read between two steps; a step of 512 tokens fills as many


class PrefillApp:
    """One prefill node; see `kvrelay.rpc.process.App`."""

    service_names = ("kvrelay.pb.Prefill",)

    def __init__(self, config: PrefillConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        self._config = config
        self._instance_id = instance_id
        self._metrics = PrefillMetrics(registry, self._blocks)
        self._service = PrefillService()
        self._engine = EngineLoop(self._make_core, self._deliver, watchdog_s=config.watchdog_s)
        self._loaded: LoadedEngine | None = None  # set on the engine thread before its start is told
        self._jobs: PrefillJobs | None = None
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
        self._jobs = await self._make_jobs(self._loaded)
        self._jobs.take(await self._engine.call(PrefillCore.report))
        self._service.jobs = self._jobs
        await self._join(address, self._loaded)
        self._spawn(self._watch_health())
        self._spawn(self._watch_engine())
        self._look_at_health()

    async def drain(self, deadline_s: float) -> None:
        """Whoever calls bounds it by `deadline_s`; jobs that still run then end with the server."""
        if self._jobs is not None:
            await self._jobs.drain()

    async def close(self) -> None:
        await self._closing.aclose()

    @property
    def info(self) -> ModelInfo:
        """What it serves; once started."""
        assert self._loaded is not None
        return self._loaded.info

    def status(self) -> NodeStatus:
        return self._jobs.status(ready=self._readiness.ready) if self._jobs else NodeStatus()

    # Parts

    def _make_core(self) -> PrefillCore:
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
        scheduler = PrefillScheduler(
            max_batched_tokens=config.max_batched_tokens,
            chunk_tokens=config.chunk_tokens,
            max_prefills=config.max_prefills,
            max_waiting=config.max_waiting,
        )
        return PrefillCore(loaded.runner, loaded.pool, scheduler, loaded.cache.read_slab, config.block_tokens)

    async def _make_jobs(self, loaded: LoadedEngine) -> PrefillJobs:
        links = DecodeLinks()
        self._closing.push_async_callback(links.close)
        store = offloader = None
        if self._config.kvstore:
            store = StoreClient(self._config.kvstore, loaded.info.layout, loaded.info.fingerprint)
            self._closing.push_async_callback(store.close)
            offloader = Offloader(store, self._read_block, batch_blocks=OFFLOAD_BLOCKS)
            self._closing.push_async_callback(offloader.close)
            await offloader.start()
            self._metrics.watch_store(store, offloader)
        return PrefillJobs(
            self._engine,
            loaded.info,
            KVAccess(loaded.cache.read_slab, loaded.cache.write_slab),
            links,
            self._metrics,
            stall_s=self._config.handoff_stall_s,
            load_limit_s=self._config.load_limit_s,
            store=store,
            offer=offloader.offer if offloader else lambda hashes: None,
            on_status=self._on_status,
        )

    async def _join(self, address: str, loaded: LoadedEngine) -> None:
        if self._config.coordinator:
            info = NodeInfo(Role.PREFILL_NODE, self._instance_id, address, loaded.info)
            self._membership = Membership(self._config.coordinator, info, self.status)
            self._closing.push_async_callback(self._membership.close)
            await self._membership.start()

    def _spawn(self, watch: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(watch)

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._closing.push_async_callback(stop)

    async def _read_block(self, block_hash: BlockHash) -> bytes | None:
        return await self._engine.call(lambda core: core.read(block_hash))

    # How the node is

    def _deliver(self, output: object) -> None:
        assert isinstance(output, PrefillOutput)
        if self._jobs is not None:
            self._jobs.take(output)

    def _blocks(self) -> BlockCounts:
        return self.status().blocks

    def _on_status(self) -> None:
        if self._membership is not None:
            self._membership.changed()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._look_at_health()

    def _look_at_health(self) -> None:
        was_ready = self._readiness.ready
        stuck = self._engine.stuck(time.monotonic())
        self._readiness.set(not stuck, "the engine has not finished a step for too long" if stuck else "")
        if self._readiness.ready != was_ready:
            self._on_status()
        if self._jobs is not None:
            self._jobs.fail_if_stuck()

    async def _watch_engine(self) -> None:
        await self._engine.wait_ended()
        if self._jobs is not None:
            self._jobs.fail_all("this prefill node's engine has stopped; use another node")


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(PrefillConfig, Role.PREFILL_NODE, PrefillApp, argv)
