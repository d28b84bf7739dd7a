"""The way to one address for as long as it is wanted: a channel, and a new one after its certificates changed.

A channel keeps the credentials that it was opened with, so one that lives for months would dial with a certificate that
ended long ago as soon as its connection breaks.
"""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.credentials import ChannelTLS

RETIRED_S = 3_600.0  # that a channel stays open after it was replaced: for calls on it, and for who still begins some


class Connection:
    """Belongs to the event loop."""

    def __init__(self, address: str, *, own_connection: bool = False, tls: ChannelTLS | None = None) -> None:
        self._address = address
        self._own_connection = own_connection
        self._tls = tls
        self._version = self._current_version()
        self._channel = self._open()
        self._retired: set[asyncio.Task[None]] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """Another one than before where certificates changed; calls on the old one run on."""
        version = self._current_version()
        if version != self._version:
            task = asyncio.create_task(_close_later(self._channel), name=f"retired channel to {self._address}")
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)
            self._version, self._channel = version, self._open()
        return self._channel

    async def close(self) -> None:
        """Ends the calls that still run."""
        retired = list(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        return open_channel(self._address, own_connection=self._own_connection, tls=self._tls)

    def _current_version(self) -> int:
        return self._tls.version if self._tls is not None else 0


async def _close_later(channel: grpc.aio.Channel) -> None:
    """At once where it is cancelled."""
    try:
        await asyncio.sleep(RETIRED_S)
    finally:
        await channel.close()
