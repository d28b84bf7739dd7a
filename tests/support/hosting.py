"""A role's app on a port of its own inside the test's process, as `kvrelay.rpc.process` would run it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.rpc import server as rpc_server
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.process import App


@asynccontextmanager
async def hosted(app: App) -> AsyncIterator[str]:
    """The address of the started app; it is closed, and its server stopped, on the way out."""
    server, readiness = rpc_server.make_server(), Readiness(app.service_names)
    app.register(server)
    readiness.register(server)
    address = f"127.0.0.1:{rpc_server.bind(server, '127.0.0.1', 0)}"
    await server.start()
    try:
        await app.start(address, readiness)
        await readiness.wait_ready()
        yield address
        await app.drain(10.0)
    finally:
        await server.stop(None)
        await app.close()
