"""How long blocks stay after their last use, where their Put does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvrelay.duration import MAX_TTL_S, parse_duration
from kvrelay.errors import ConfigError

NO_END = 0.0


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Seconds; NO_END where eviction alone ends it."""

    default_s: float = NO_END
    by_tenant: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def parse(cls, default: str, texts: Sequence[str]) -> Lifetimes:
        """From "1h" and `texts` such as "alice=5m" or "bob=none". Raises ConfigError."""
        by_tenant: dict[str, float] = {}
        for text in texts:
            tenant, separator, duration = text.rpartition("=")
            if not separator or not tenant:
                raise ConfigError(f"lifetime {text!r} is not NAME=TIME, such as alice=5m")
            if tenant in by_tenant:
                raise ConfigError(f"tenant {tenant!r} has two lifetimes")
            by_tenant[tenant] = parse_lifetime(duration)
        return cls(parse_lifetime(default), MappingProxyType(by_tenant))

    def of(self, tenant: str) -> float:
        return self.by_tenant.get(tenant, self.default_s)


def parse_lifetime(text: str) -> float:
    """Seconds of "90s", "5m", "1h", "7d" or "none", which is NO_END. Raises ConfigError."""
    if text.strip().lower() == "none":
        return NO_END
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"lifetime {text!r} is not a time such as 90s, 5m, 1h, 7d or none") from error
    if not 0 < seconds <= MAX_TTL_S:
        raise ConfigError(f"lifetime {text!r} is out of range; over 0 and at most 3650d are allowed, and none")
    return seconds
