"""Who is calling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from coordinator.tenants import Tenant

Context = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[Context], Tenant]


def identify(context: Context) -> Tenant:
    """The tenant that a call proves to be.

    No call is authenticated yet, so everyone is the default tenant: nothing that a client merely writes, in a field or
    in its metadata, may make it another one.
    """
    return Tenant()
