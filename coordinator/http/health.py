"""GET /health, /ready and /live: no key is asked for."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.rpc.health import Readiness


class Health:
    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def ready(self, request: Request) -> Response:
        """200 while a request sent now would be served, else 503 and why not. /health is the same: true health."""
        if self._readiness.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": self._readiness.reason}, 503, {"retry-after": "1"})

    async def live(self, request: Request) -> Response:
        """503 only where nothing but a restart will help."""
        alive = self._readiness.alive
        return JSONResponse({"status": "alive" if alive else "not alive"}, 200 if alive else 503)
