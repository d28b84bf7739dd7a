"""How many bytes each tenant may hold in a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvrelay.byte_size import parse_size, show_size
from kvrelay.errors import ConfigError

NO_BOUND = 0
MAX_TENANT_CHARS = 64  # as PutBegin.tenant


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes; NO_BOUND where a tenant is bounded by the tier alone."""

    default_bytes: int = NO_BOUND
    by_tenant: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def parse(cls, default_bytes: int, texts: Sequence[str]) -> Quotas:
        """From `texts` such as "alice=2GiB"; 0 takes the bound away. Raises ConfigError."""
        if default_bytes < 0:
            raise ConfigError(f"a quota of {default_bytes} bytes is below 0")
        by_tenant: dict[str, int] = {}
        for text in texts:
            tenant, num_bytes = _parse_one(text)
            if tenant in by_tenant:
                raise ConfigError(f"tenant {tenant!r} has two quotas")
            by_tenant[tenant] = num_bytes
        return cls(default_bytes, MappingProxyType(by_tenant))

    def of(self, tenant: str) -> int:
        """Bytes `tenant` may hold; NO_BOUND: as many as fit."""
        return self.by_tenant.get(tenant, self.default_bytes)

    def __str__(self) -> str:
        shown = [f"{tenant}={show_size(num_bytes)}" for tenant, num_bytes in self.by_tenant.items()]
        return ", ".join(
            [*shown, f"others {show_size(self.default_bytes)}" if self.default_bytes else "others unbounded"]
        )


def _parse_one(text: str) -> tuple[str, int]:
    tenant, separator, size = text.rpartition("=")  # a tenant's name may hold "="
    if not separator or not 1 <= len(tenant) <= MAX_TENANT_CHARS:
        raise ConfigError(f"quota {text!r} is not NAME=BYTES, such as alice=2GiB")
    try:
        return tenant, parse_size(size)
    except ValueError as error:
        raise ConfigError(f"quota {text!r}: {size!r} is not a size such as 4096, 512MiB or 2GiB") from error
