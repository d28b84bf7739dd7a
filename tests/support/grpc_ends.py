"""Real grpc.aio ends on port 0, and a TCP proxy whose link can be cut silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.interceptor import OnError, OnOpen
from kvrelay.rpc.server import bind, make_server


@asynccontextmanager
async def serving(
    *register: Callable[[grpc.aio.Server], None],
    port: int = 0,
    on_error: OnError | None = None,
    on_open: OnOpen | None = None,
) -> AsyncIterator[int]:
    """A started server, stopped on the way out; yields its port."""
    server = make_server(on_error=on_error, on_open=on_open)
    for add in register:
        add(server)
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(
    *register: Callable[[grpc.aio.Server], None], on_error: OnError | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with these handlers."""
    async with serving(*register, on_error=on_error) as port, open_channel(f"127.0.0.1:{port}") as channel:
        yield channel


class Proxy:
    """Forwards bytes both ways until `cut`, after which they vanish and the connections stay open."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._is_closed = False
        self.port = 0

    def cut(self) -> None:
        self._is_cut = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._is_closed = True
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._is_closed:  # it was being accepted meanwhile
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.CancelledError):
                await self._relay(reader, writer)
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer))
                group.create_task(self._forward(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65_536):
                if not self._is_cut:
                    sink.write(data)
                    await sink.drain()
        sink.close()
