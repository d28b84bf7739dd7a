"""What stands around the core of a node: the engine thread and its watchdog, membership, the way to the kvstore.

A role brings its core and its requests; this starts what both kinds of node need, and closes it in reverse.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar, cast

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.loop import EngineCore, EngineLoop
from kvrelay.engine.metrics import NodeCollector, StoreClientCollector
from kvrelay.errors import ModelFileError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import ChainBlock
from kvrelay.kv.offload import Offloader
from kvrelay.kv.open_store import open_store
from kvrelay.kv.quiet import Quiet
from kvrelay.matchers import Matchers, make_matchers
from kvrelay.model.weight_source import WeightForms
from kvrelay.role_config import NodeConfig
from kvrelay.rpc.credentials import peer_tls
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.memberships import Memberships
from kvrelay.rpc.node_service import NodeService
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from kvrelay.types import BlockHash, InstanceId, Role

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.25  # how often the engine's watchdog is asked; its own limit is far longer
# Watchdog times that one step may hang before only a restart helps. A step that is merely slow (a machine that swaps, a
# device that resets) ends well before; a restart costs the model's load and every block cached here, so it comes late.
HOPELESS_WATCHDOGS = 6

C = TypeVar("C", bound=EngineCore)


class EngineHost(Generic[C]):
    """One node's. Belongs to the event loop, `make_core` apart."""

    def __init__(
        self,
        config: NodeConfig,
        instance_id: InstanceId,
        registry: CollectorRegistry,
        *,
        make_core: Callable[[LoadedEngine], C],
        deliver: Callable[[object], None],
        status: Callable[[], NodeStatus],
        on_stuck: Callable[[], None],
        max_decode_rows: int = 0,
    ) -> None:
        """`make_core` runs on the engine thread; `status` is also read by whoever scrapes, on another thread.

        `on_stuck` gives running requests up; it is called again and again while the engine is stuck.
        `max_decode_rows` is load_engine's.
        """
        self.engine: EngineLoop[C] = EngineLoop(self._load, deliver, watchdog_s=config.watchdog_s)
        self.readiness = Readiness()
        self.matchers: Matchers | None = None  # of the model's tokenizer, once started; None without one
        self.tls = peer_tls(config)
        self._quiet = Quiet()
        self._config = config
        self._instance_id = instance_id
        self._registry = registry
        self._make_core = make_core
        self._status = status
        self._on_stuck = on_stuck
        self._max_decode_rows = max_decode_rows
        self._loaded: LoadedEngine | None = None  # set on the engine thread before its start is told
        self._offloader: Offloader | None = None
        self._memberships: Memberships | None = None
        self._service = NodeService(config.weight, self.changed)
        self._closing = AsyncExitStack()

    def register(self, server: grpc.aio.Server) -> None:
        """What nodes of both kinds can be told."""
        self._service.register(server)

    async def start(self, readiness: Readiness) -> LoadedEngine:
        """Loads the model and makes the core. Raises ModelFileError or ConfigError."""
        self.readiness = readiness
        self._closing.push_async_callback(self.engine.stop)
        reading = asyncio.create_task(asyncio.to_thread(_read_tokenizer, self._config.model))
        try:
            await self.engine.start()
            tokenizer = await reading
        finally:
            reading.cancel()
        loaded = self.loaded
        if tokenizer is not None:
            self.matchers = await asyncio.to_thread(make_matchers, tokenizer, loaded.info.eos_token_ids)
        if self.matchers is not None:
            self._closing.callback(self.matchers.close)
        NodeCollector(self._registry, self.reported, lambda: loaded.pool.num_evictions)
        return loaded

    @property
    def loaded(self) -> LoadedEngine:
        """Once started."""
        assert self._loaded is not None
        return self._loaded

    async def open_store(
        self, read: Callable[[C, BlockHash], bytes | None], *, batch_blocks: int = 16
    ) -> BlockStore | None:
        """The configured kvstores, if any; `offer` sends there what `read` gives on the engine thread."""
        if not self._config.kvstore:
            return None

        async def read_block(block_hash: BlockHash) -> bytes | None:
            return await self.engine.call(lambda core: read(core, block_hash))

        config, info = self._config, self.loaded.info
        store = open_store(config.kvstore, config.kvstore_replicas, info.layout, info.fingerprint, self.tls)
        self._closing.push_async_callback(store.close)
        self._offloader = Offloader(store, read_block, quiet=self._quiet, batch_blocks=batch_blocks)
        self._closing.push_async_callback(self._offloader.close)
        await self._offloader.start()
        StoreClientCollector(self._registry, store, self._offloader)
        return store

    def offer(self, blocks: Sequence[ChainBlock], *, urgent: bool = False) -> None:
        """Has finished blocks sent to the kvstore in the background; does nothing without one."""
        if self._offloader is not None:
            self._offloader.offer(blocks, urgent=urgent)

    async def join(self, role: Role, address: str) -> None:
        """Everything is there: joins the configured coordinators, if any, and sets readiness from now on."""
        info = NodeInfo(role, self._instance_id, address, self.loaded.info)
        cached = self.loaded.pool.named
        self._memberships = Memberships(self._config.coordinator, info, self.reported, cached=cached, tls=self.tls)
        self._closing.push_async_callback(self._memberships.close)
        await self._memberships.start()
        self._look_at_health()
        self.spawn(self._watch_health())

    def changed(self) -> None:
        """`status` reads otherwise now: the coordinators hear of it, and offloading whether it may work."""
        self._quiet.set(self._status().num_running == 0)
        if self._memberships is not None:
            self._memberships.changed()

    def on_close(self, close: Callable[[], Awaitable[object]]) -> None:
        """Has `close` called before what was started so far is closed."""
        self._closing.push_async_callback(close)

    def spawn(self, watch: Coroutine[None, None, None]) -> None:
        """Runs `watch` until it ends or the host is closed."""
        task = asyncio.create_task(watch)

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._closing.push_async_callback(stop)

    async def close(self) -> None:
        """Closes what was started, also after a failed or cancelled start."""
        await self._closing.aclose()

    def reported(self) -> NodeStatus:
        """What coordinators, and who scrapes, are told."""
        return replace(self._status(), weight=self._service.weight)

    def _load(self) -> C:
        """Runs on the engine thread."""
        config = self._config
        self._loaded = load_engine(
            config.model,
            name=config.model_name,
            dtype=config.dtype,
            num_blocks=config.num_blocks,
            kv_bytes=config.kv_bytes,
            block_tokens=config.block_tokens,
            threads=config.threads,
            device=config.device,
            weights=cast(WeightForms, config.weights),  # of the choices that the setting allows
            decoder=config.decoder,
            max_decode_rows=self._max_decode_rows,
        )
        return self._make_core(self._loaded)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._look_at_health()

    def _look_at_health(self) -> None:
        was_ready = self.readiness.ready
        stuck = self.engine.stuck(time.monotonic())
        self.readiness.set(not stuck, self._why_stuck() if stuck else "")
        if self.readiness.ready != was_ready:
            self.changed()
        if stuck:
            self._on_stuck()
        self._look_at_life()

    def _why_stuck(self) -> str:
        return "the engine has died" if self.engine.died else "the engine has not finished a step for too long"

    def _look_at_life(self) -> None:
        busy_s = self.engine.busy_s(time.monotonic())
        hopeless = busy_s > HOPELESS_WATCHDOGS * self._config.watchdog_s
        self.readiness.set_alive(
            not (self.engine.died or hopeless),
            "the engine thread has ended" if self.engine.died else f"one engine step has taken {busy_s:.0f} s so far",
        )


def _read_tokenizer(model: Path) -> Tokenizer | None:
    """Only answers that are held to something need it: where there is none, the node serves the others."""
    try:
        return load_tokenizer(model)
    except ModelFileError as error:
        logger.warning("no answer can be held to a schema or a grammar: %s", error.message)
        return None
