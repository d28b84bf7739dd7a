"""The HTTP door as a server inside the coordinator's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kvrelay.errors import ConfigError

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # for replies under way when all work is done
BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than balancers in front keep a connection that is idle: they are to close it


class HttpServer:
    """`close` ends it, also after a failed start."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        config = uvicorn.Config(
            app,
            http="h11",
            ssl_context_factory=None if tls is None else lambda config, default: tls,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",  # the process says itself that it starts and ends
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._scheme = "http" if tls is None else "https"
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> None:
        """Answers from now on; `port` 0 takes any free one. Raises ConfigError when it cannot be had."""
        listener = _listen(host, port)
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        logger.info("http on %s", base_url(host, self.port, self._scheme))

    async def close(self) -> None:
        """Takes no more connections; replies under way have LINGER_S."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=LINGER_S)
        self._server.force_exit = True
        self._server.cut()
        await asyncio.wait({self._serving}, timeout=LINGER_S)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own."""
        yield

    def cut(self) -> None:
        """Ends the connections that are left."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def base_url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"http port {port} on {host} cannot be opened ({error.strerror}); choose another with --http-port, or -1 "
            "for none"
        ) from error
    return listener
