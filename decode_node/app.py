"""Puts the node together, in order, and takes it apart in reverse."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry

from decode_node.config import DecodeConfig
from decode_node.engine import DecodeCore, EngineLoad
from decode_node.metrics import DecodeMetrics
from decode_node.node import DecodeNode
from decode_node.resume import ResumeCosts
from decode_node.scheduler import Scheduler
from decode_node.service import SERVICE_NAMES, DecodeService
from decode_node.step_size import DecodeStepSize
from kvrelay.cluster import NodeStatus
from kvrelay.engine.host import EngineHost
from kvrelay.engine.load import LoadedEngine
from kvrelay.kv.block_store import BlockStore
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.types import InstanceId, Role

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
        self._service = DecodeService()
        self._core: DecodeCore | None = None  # set on the engine thread before its start is told
        self.host: EngineHost[DecodeCore] = EngineHost(
            config,
            instance_id,
            registry,
            make_core=self._make_core,
            deliver=self._deliver,
            status=self.status,
            on_stuck=self._on_stuck,
            max_decode_rows=config.max_batch,
        )

    @property
    def doors(self) -> Sequence[Door]:
        return (Door(self._config.port, self.register, self.service_names, tls=self.host.tls),)

    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)
        self.host.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        """Loads the model, then joins the coordinator. Raises ModelFileError or ConfigError."""
        loaded = await self.host.start(readiness)
        store = await self.host.open_store(DecodeCore.read_block)
        self._service.node = await self._start_node(loaded, store)
        await self.host.join(Role.DECODE_NODE, address)

    async def drain(self, deadline_s: float) -> None:
        try:
            if self._service.node is not None:
                await self._service.node.drain(max(0.0, deadline_s - LAST_WORDS_S))
        finally:
            self._service.end_streams()

    async def close(self) -> None:
        await self.host.close()

    def status(self) -> NodeStatus:
        if self._service.node is None:
            return NodeStatus(not_ready_reason=self.host.readiness.reason)
        return self._service.node.status()

    def _make_core(self, loaded: LoadedEngine) -> DecodeCore:
        """Runs on the engine thread."""
        self._core = DecodeCore(
            info=loaded.info,
            runner=loaded.runner,
            cache=loaded.cache,
            pool=loaded.pool,
            scheduler=Scheduler(self._config.limits, DecodeStepSize(self._config.marks, self._config.itl_target_s)),
            costs=ResumeCosts(loaded.info.layout, with_store=bool(self._config.kvstore)),
        )
        return self._core

    async def _start_node(self, loaded: LoadedEngine, store: BlockStore | None) -> DecodeNode:
        node = DecodeNode(
            engine=self.host.engine,
            info=loaded.info,
            cache=loaded.cache,
            instance_id=self._instance_id,
            metrics=self._metrics,
            limits=self._config.limits,
            lease_s=self._config.lease_s,
            load=self._load,
            changed=self.host.changed,
            offer=self.host.offer,
            store=store,
            matchers=self.host.matchers,
        )
        self.host.on_close(node.close)
        await node.start()
        return node

    def _load(self) -> EngineLoad:
        return self._core.load if self._core is not None else EngineLoad()

    def _deliver(self, output: object) -> None:
        if self._service.node is not None:
            self._service.node.deliver(output)

    def _on_stuck(self) -> None:
        if self._service.node is not None:
            self._service.node.end_if_stuck()
