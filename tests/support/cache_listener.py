"""A coordinator that only listens to what a node has cached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvrelay.cluster import CacheEvents, NodeInfo
from kvrelay.pb import cluster_pb2, cluster_pb2_grpc
from kvrelay.rpc import convert_cluster


class CacheListener(cluster_pb2_grpc.ClusterServicer):
    """A coordinator that accepts a node, and asks it for its cache unless it is an older one."""

    def __init__(self, *, asks: bool = True) -> None:
        self.asks = asks
        self.joined: asyncio.Queue[NodeInfo] = asyncio.Queue()
        self.told: asyncio.Queue[CacheEvents] = asyncio.Queue()
        self.num_statuses = 0
        self._says: asyncio.Queue[cluster_pb2.JoinEvent] = asyncio.Queue()

    async def Join(self, request_iterator: AsyncIterator[cluster_pb2.NodeEvent], context: Any) -> AsyncIterator[Any]:
        reading = asyncio.create_task(self._read(request_iterator))
        yield cluster_pb2.JoinEvent(accepted=cluster_pb2.JoinAccepted(coordinator_instance_id="c"))
        if self.asks:
            yield resync()
        try:
            while True:
                yield await self._says.get()
        finally:
            reading.cancel()

    def ask_again(self) -> None:
        self._says.put_nowait(resync())

    async def _read(self, events: AsyncIterator[cluster_pb2.NodeEvent]) -> None:
        async for event in events:
            if event.WhichOneof("event") == "joined":
                self.joined.put_nowait(convert_cluster.node_info_from_pb(event.joined))
            if event.WhichOneof("event") == "cache":
                self.told.put_nowait(convert_cluster.cache_events_from_pb(event.cache))
            self.num_statuses += event.WhichOneof("event") == "status"

    def register(self, server: Any) -> None:
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, server)


def resync() -> cluster_pb2.JoinEvent:
    return cluster_pb2.JoinEvent(resync=cluster_pb2.Resync())
