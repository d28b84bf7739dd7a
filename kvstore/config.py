"""What the kvstore can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config import JOIN_HELP, RoleConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig(RoleConfig):
    """One process holds `path`; its file never exceeds `disk_bytes`, of which blocks fill four fifths."""

    memory_bytes: int = option(1 << 30, "slabs kept in memory", unit="bytes", minimum=0)
    path: str = option("", "directory of the LMDB tier; none: memory only", unit="directory")
    disk_bytes: int = option(4 << 30, "size its LMDB file may reach", unit="bytes", minimum=1 << 20)
    coordinator: tuple[str, ...] = option((), JOIN_HELP, unit="host:port")
