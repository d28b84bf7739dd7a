"""Connections to the nodes, one channel an address with one stream of answers, and the calls that give reservations
back behind a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import grpc

from kvrelay.errors import KVRelayError
from kvrelay.messages import NodeRequest, ReservationGranted
from kvrelay.rpc.connection import Connection
from kvrelay.rpc.credentials import ChannelTLS
from kvrelay.rpc.nodes import DecodeClient, PrefillClient
from kvrelay.types import ReservationId

logger = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 5.0


class Nodes:
    """Typed clients by address."""

    def __init__(self, tls: ChannelTLS | None = None) -> None:
        self._tls = tls
        self._connections: dict[str, Connection] = {}
        self._decode: dict[str, dict[grpc.aio.Channel, DecodeClient]] = {}  # more than one where certificates changed
        self._background: set[asyncio.Task[None]] = set()

    def prefill(self, address: str) -> PrefillClient:
        return PrefillClient(self._channel(address))

    def decode(self, address: str) -> DecodeClient:
        clients, channel = self._decode.setdefault(address, {}), self._channel(address)
        if channel not in clients:
            clients[channel] = DecodeClient(channel)
        return clients[channel]

    async def reserve(
        self, address: str, request: NodeRequest, num_tokens: int, num_tokens_now: int = 0, itl_target_s: float = 0.0
    ) -> ReservationGranted:
        """As DecodeClient.reserve. Cancelled meanwhile, a grant that still comes is given back at once."""
        client = self.decode(address)
        call = asyncio.ensure_future(
            client.reserve(
                *(request, num_tokens, RESERVE_TIMEOUT_S), num_tokens_now=num_tokens_now, itl_target_s=itl_target_s
            )
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._run(self._release_granted(address, call))
            raise

    def release(self, address: str, reservation_id: ReservationId) -> None:
        """Gives a reservation back in the background; the lease covers a node that cannot be reached or is lost."""
        self._run(self._release(address, reservation_id))

    def forget(self, address: str) -> None:
        """The process there is gone, and its answers end; the next one gets a new channel, without the old one's
        reconnect delay."""
        for client in self._decode.pop(address, {}).values():
            client.close()
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._run(connection.close())

    async def close(self) -> None:
        """Waits for the releases, then closes every channel."""
        while self._background:
            await asyncio.wait(self._background)
        for client in (client for clients in self._decode.values() for client in clients.values()):
            client.close()
        self._decode.clear()
        for connection in self._connections.values():
            await connection.close()
        self._connections.clear()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._connections:
            self._connections[address] = Connection(address, own_connection=True, tls=self._tls)
        return self._connections[address].channel

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release_granted(self, address: str, call: asyncio.Future[ReservationGranted]) -> None:
        try:
            granted = await call
        except KVRelayError:
            return
        await self._release(address, granted.reservation_id)

    async def _release(self, address: str, reservation_id: ReservationId) -> None:
        connection = self._connections.get(address)
        if connection is None:
            return  # forgotten meanwhile: a new channel to it would never be closed
        try:
            await asyncio.wait_for(DecodeClient(connection.channel).release(reservation_id), RELEASE_TIMEOUT_S)
        except (KVRelayError, TimeoutError) as error:
            logger.info("reservation %s on %s was left to its lease: %s", reservation_id, address, error)
