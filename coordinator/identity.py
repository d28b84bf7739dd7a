"""Who is calling, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from coordinator.tenants import Tenant
from kvrelay.errors import PermissionDeniedError


class Scope(Enum):
    INFER = "infer"  # ask, tokenize, list models, look at and end one's own requests
    ADMIN = "admin"  # see the whole cluster


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """Of one key or token; 0 sets no bound."""

    max_open: int = 0  # answers of it, waiting or computed, at a time


@dataclass(frozen=True, slots=True)
class Identity:
    """`name` is what `limits` are counted by: a key's id, or a token's subject."""

    tenant: Tenant = Tenant()
    scopes: frozenset[Scope] = frozenset(Scope)
    limits: CallerLimits = CallerLimits()
    name: str = ""

    def check(self, scope: Scope) -> None:
        """Raises PermissionDeniedError."""
        if scope not in self.scopes:
            has = ", ".join(sorted(one.value for one in self.scopes)) or "none"
            raise PermissionDeniedError(f"this needs the scope {scope.value}; {self.name or 'the caller'} has {has}")


ANYONE = Identity()  # while no call is authenticated

Context = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[Context], Identity]

# Each call is served by a task of its own, which sets it before the call's handler runs.
caller: ContextVar[Identity] = ContextVar("caller", default=ANYONE)


def identify(context: Context) -> Identity:
    """Who the call was proven to come from: nothing that a client merely writes, in a field or in its metadata, makes
    it another one."""
    return caller.get()
