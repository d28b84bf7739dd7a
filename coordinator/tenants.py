"""Isolation domains. A tenant's salt enters the root of every block hash, so two tenants never share a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` is 0 to 64 bytes; an empty one is the public namespace."""

    name: str
    salt: bytes


DEFAULT_TENANT = Tenant("default", salt=b"")
