"""Clusters of real processes on loopback, those that the end-to-end tests start, for the time of a measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from bench.engine.launch import WorkerFailedError
from kvrelay.errors import KVRelayError
from tests.support.cluster import Cluster

AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@asynccontextmanager
async def running(cluster: AnyCluster) -> AsyncIterator[AnyCluster]:
    """Starts it, and ends it with the block. Raises WorkerFailedError for what a process or an answer failed of."""
    try:
        await asyncio.to_thread(cluster.start)
        yield cluster
    except (KVRelayError, RuntimeError, TimeoutError, AssertionError) as error:
        raise WorkerFailedError(f"{type(error).__name__}: {error}\n{cluster.logs()}\n{error}") from error
    finally:
        cluster.kill()
