"""`kvrelay kvstore`: puts the store together, in order, and takes it apart in reverse."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.rpc import process
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.memberships import Memberships
from kvrelay.rpc.raw import KV_TRANSFER
from kvrelay.types import InstanceId, Role
from kvstore.config import KVStoreConfig
from kvstore.directory import current_boot_id
from kvstore.disk import DiskTier
from kvstore.memory import MemoryTier
from kvstore.metrics import StoreCollector
from kvstore.service import KVStoreService
from kvstore.store import Store


class KVStoreApp:
    """See `kvrelay.rpc.process.App`. Raises ConfigError if the path is in use or cannot be used."""

    service_names = ("kvrelay.pb.KVStore", KV_TRANSFER)

    def __init__(self, config: KVStoreConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        self._config = config
        self._instance_id = instance_id
        disk = DiskTier(Path(config.path), config.disk_bytes, current_boot_id()) if config.path else None
        self._store = Store(MemoryTier(config.memory_bytes), disk, time.monotonic)
        self._service = KVStoreService(self._store)
        self._readiness = Readiness()
        self._memberships: Memberships | None = None
        StoreCollector(registry, self._store.stats)

    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        self._readiness = readiness
        await self._store.start()
        info = NodeInfo(Role.KVSTORE, self._instance_id, address, None)
        self._memberships = Memberships(self._config.coordinator, info, self.status)
        await self._memberships.start()
        readiness.set(True)

    async def drain(self, deadline_s: float) -> None:
        """Writes what was accepted."""
        self._service.draining = True
        if self._memberships is not None:
            self._memberships.changed()
        await self._store.flush(deadline_s)

    async def close(self) -> None:
        if self._memberships is not None:
            await self._memberships.close()
        await self._store.close()

    def status(self) -> NodeStatus:
        stats = self._store.stats()
        return NodeStatus(
            ready=self._readiness.ready,
            not_ready_reason=self._readiness.reason,
            draining=self._service.draining,
            memory_bytes=stats.memory.num_bytes,
            disk_bytes=stats.disk.num_bytes,
        )


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(KVStoreConfig, Role.KVSTORE, lambda: KVStoreApp, argv)
