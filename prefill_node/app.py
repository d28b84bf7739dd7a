"""Puts the node together, in order, and takes it apart in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeStatus
from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.engine.host import EngineHost
from kvrelay.engine.load import LoadedEngine
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.load_or_compute import LoadOrCompute
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.types import InstanceId, Role
from prefill_node.config import PrefillConfig
from prefill_node.engine import PrefillCore, PrefillOutput
from prefill_node.jobs import KVAccess, PrefillJobs
from prefill_node.links import DecodeLinks, open_own
from prefill_node.metrics import PrefillMetrics
from prefill_node.rates import PrefillRates
from prefill_node.scheduler import PrefillScheduler
from prefill_node.service import SERVICE_NAMES, PrefillService

LEAST_STEP_TOKENS = 32  # however long newcomers wait
OFFLOAD_BLOCKS = 32  # read between two steps; a step of 512 tokens fills as many


class PrefillApp:
    """One prefill node; see `kvrelay.rpc.process.App`."""

    service_names = SERVICE_NAMES

    def __init__(self, config: PrefillConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        self._config = config
        self._metrics = PrefillMetrics(registry)
        self._service = PrefillService()
        self.host: EngineHost[PrefillCore] = EngineHost(
            config,
            instance_id,
            registry,
            make_core=self._make_core,
            deliver=self._deliver,
            status=self.status,
            on_stuck=self._on_stuck,
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
        store = await self.host.open_store(PrefillCore.read, batch_blocks=OFFLOAD_BLOCKS)
        jobs = self._make_jobs(loaded, store)
        jobs.take(await self.host.engine.call(PrefillCore.report))
        self._service.jobs = jobs
        self.host.spawn(self._watch_engine(jobs))
        await self.host.join(Role.PREFILL_NODE, address)

    async def drain(self, deadline_s: float) -> None:
        """Whoever calls bounds it by `deadline_s`; jobs that still run then end with the server."""
        if self._service.jobs is not None:
            await self._service.jobs.drain()

    async def close(self) -> None:
        await self.host.close()

    def status(self) -> NodeStatus:
        jobs = self._service.jobs
        readiness = self.host.readiness
        if jobs is None:
            return NodeStatus(not_ready_reason=readiness.reason)
        return jobs.status(ready=readiness.ready, not_ready_reason=readiness.reason)

    def _make_core(self, loaded: LoadedEngine) -> PrefillCore:
        """Runs on the engine thread."""
        marks = self._config.marks
        size = AdaptiveBound(marks, LEAST_STEP_TOKENS) if marks else None
        scheduler = PrefillScheduler(self._config.limits, size)
        return PrefillCore(loaded.runner, loaded.pool, scheduler, loaded.cache.read_slab, self._config.block_tokens)

    def _make_jobs(self, loaded: LoadedEngine, store: BlockStore | None) -> PrefillJobs:
        rates = PrefillRates()
        links = DecodeLinks(
            loaded.info.layout.slab_bytes, partial(open_own, tls=self.host.tls), on_carried=rates.carried
        )
        self.host.on_close(links.close)
        return PrefillJobs(
            self.host.engine,
            loaded.info,
            KVAccess(loaded.cache.view_slabs, loaded.cache.write_slab),
            links,
            self._metrics,
            stall_s=self._config.handoff_stall_s,
            load_limit_s=self._config.load_limit_s,
            store=store,
            costs=self._make_costs(),
            rates=rates,
            matchers=self.host.matchers,
            offer=self.host.offer,
            on_status=self.host.changed,
        )

    def _make_costs(self) -> LoadOrCompute:
        config = self._config
        always_s = config.load_limit_s if config.prefix_load == "always" else None
        return LoadOrCompute(config.block_tokens, always_head_start_s=always_s)

    async def _watch_engine(self, jobs: PrefillJobs) -> None:
        await self.host.engine.wait_ended()
        jobs.fail_all("this prefill node's engine has stopped; use another node")

    def _deliver(self, output: object) -> None:
        assert isinstance(output, PrefillOutput)
        if self._service.jobs is not None:
            self._service.jobs.take(output)

    def _on_stuck(self) -> None:
        if self._service.jobs is not None:
            self._service.jobs.fail_if_stuck()
