"""`kvrelay kvstore`: puts the store together, in order, and takes it apart in reverse."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.errors import ConfigError
from kvrelay.rpc import process
from kvrelay.rpc.credentials import peer_tls
from kvrelay.rpc.door import Door
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.memberships import Memberships
from kvrelay.rpc.raw import KV_TRANSFER
from kvrelay.types import InstanceId, Role
from kvstore.config import KVStoreConfig
from kvstore.directory import current_boot_id
from kvstore.disk import DiskTier
from kvstore.lifetimes import parse_lifetime
from kvstore.memory import MemoryTier
from kvstore.metrics import StoreCollector
from kvstore.options import StoreOptions
from kvstore.placement import WritePolicy
from kvstore.service import KVStoreService
from kvstore.store import Store


class KVStoreApp:
    """See `kvrelay.rpc.process.App`. Raises ConfigError if the path is in use or cannot be used."""

    service_names = ("kvrelay.pb.KVStore", KV_TRANSFER)

    def __init__(self, config: KVStoreConfig, instance_id: InstanceId, registry: CollectorRegistry) -> None:
        self._config = config
        self._instance_id = instance_id
        self._tls = peer_tls(config)
        self._store = _store(config)
        self._service = KVStoreService(self._store)
        self._readiness = Readiness()
        self._memberships: Memberships | None = None
        StoreCollector(registry, self._store.counts)

    @property
    def doors(self) -> Sequence[Door]:
        return (Door(self._config.port, self.register, self.service_names, tls=self._tls),)

    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)

    async def start(self, address: str, readiness: Readiness) -> None:
        self._readiness = readiness
        await self._store.start()
        info = NodeInfo(Role.KVSTORE, self._instance_id, address, None)
        self._memberships = Memberships(self._config.coordinator, info, self.status, tls=self._tls)
        await self._memberships.start()
        readiness.set(True)

    async def drain(self, deadline_s: float) -> None:
        """Writes what was accepted, and what the write policy kept back until now."""
        self._service.draining = True
        if self._memberships is not None:
            self._memberships.changed()
        await self._store.drain(deadline_s)

    async def close(self) -> None:
        if self._memberships is not None:
            await self._memberships.close()
        await self._store.close()

    def status(self) -> NodeStatus:
        stats = self._store.counts()
        return NodeStatus(
            ready=self._readiness.ready,
            not_ready_reason=self._readiness.reason,
            draining=self._service.draining,
            memory_bytes=stats.memory.num_bytes,
            disk_bytes=stats.disk.num_bytes,
        )


def _memory(config: KVStoreConfig) -> MemoryTier:
    try:
        return MemoryTier(config.memory_bytes, config.quotas())
    except OSError as error:
        raise ConfigError(f"kvstore memory_bytes {config.memory_bytes}: {error.strerror}; take less") from error


def _store(config: KVStoreConfig) -> Store:
    """Raises ConfigError if the path is in use or cannot be used, or the memory cannot be had."""
    options = StoreOptions(
        write_policy=WritePolicy(config.write_policy),
        reuse_hits=config.reuse_hits,
        min_reuse=config.min_reuse,
        disk_quotas=config.quotas(),
        lifetimes=config.lifetimes(),
        namespace_ttl_s=parse_lifetime(config.namespace_ttl),
    )
    memory = _memory(config)
    disk = None
    if config.path:
        path, disposable = Path(config.path), config.disk_disposable
        disk = DiskTier(path, config.disk_bytes, current_boot_id(), disposable=disposable)
    return Store(memory, disk, time.monotonic, options)


def main(argv: Sequence[str] | None = None) -> int:
    return process.main(KVStoreConfig, Role.KVSTORE, lambda: KVStoreApp, argv)
