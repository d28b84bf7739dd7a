"""What the kvstore can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.option import option
from kvrelay.role_config import JOIN_HELP, RoleConfig
from kvstore.lifetimes import Lifetimes, parse_lifetime
from kvstore.placement import WritePolicy
from kvstore.quotas import Quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStoreConfig(RoleConfig):
    """One process holds `path`; its file never exceeds `disk_bytes`, of which blocks fill four fifths."""

    memory_bytes: int = option(1 << 30, "slabs kept in memory", unit="bytes", minimum=0)
    path: str = option("", "directory of the LMDB tier; none: memory only", unit="directory")
    disk_bytes: int = option(4 << 30, "size its LMDB file may reach", unit="bytes", minimum=1 << 20)
    disk_disposable: bool = option(
        False,
        "never wait for the disk (no fsync): what was written outlives the process, but not a crash of the machine, "
        "after which the disk tier starts empty",
    )
    write_policy: str = option(
        "through",
        "when blocks go to disk: through as they come, back when they leave memory or the store ends, reuse once they "
        "were served reuse_hits times",
        choices=[policy.value for policy in WritePolicy],
    )
    reuse_hits: int = option(1, "see write_policy", minimum=1)
    min_reuse: float = option(
        0.05,
        "places in a chain whose blocks are measured to be used again less often, as a share, do not go to disk; "
        "0: all do",
        minimum=0,
        maximum=1,
    )
    ttl: str = option("none", "how long blocks stay after their last use: 90s, 5m, 1h, 7d, or none for no end")
    tenant_ttl: str = option("", "the same for single tenants, NAME=TIME with commas between, such as alice=5m")
    namespace_ttl: str = option("7d", "blocks of a model or layout that nobody used for so long go; none: they stay")
    default_quota: int = option(
        0, "bytes each tenant may hold in each tier; 0 leaves it to the others' need", unit="bytes", minimum=0
    )
    tenant_quota: str = option("", "the same for single tenants, NAME=BYTES with commas between, such as alice=2GiB")
    coordinator: tuple[str, ...] = option((), JOIN_HELP, unit="host:port")

    def quotas(self) -> Quotas:
        """Of either tier. Raises ConfigError."""
        return Quotas.parse(self.default_quota, _split(self.tenant_quota))

    def lifetimes(self) -> Lifetimes:
        """Raises ConfigError."""
        return Lifetimes.parse(self.ttl, _split(self.tenant_ttl))

    def check(self) -> None:
        self.quotas()
        self.lifetimes()
        parse_lifetime(self.namespace_ttl)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
