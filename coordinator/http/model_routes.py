"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.front_door import FrontDoor
from coordinator.served_models import ServedModel


class Models:
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._created = int(time.time())

    async def list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._body(served) for served in self._door.models]})

    async def one(self, request: Request) -> Response:
        return JSONResponse(self._body(self._door.models.find(request.path_params["name"])))

    def _body(self, served: ServedModel) -> dict[str, Any]:
        """`max_model_len` is null while no node has said it; `ready`: a request sent now would be served."""
        listed = served.listed()
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "max_model_len": None if listed.info is None else listed.info.max_model_len,
            "ready": listed.ready,
        }
