"""Which path is whose, and what becomes of errors."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.auth import Authenticator
from coordinator.front_door import FrontDoor
from coordinator.http.callers import Callers
from coordinator.http.errors import ClientLeftError, NoMethodError, NoRouteError, error_response
from coordinator.http.generate import Generating
from coordinator.http.health import Health
from coordinator.http.model_routes import Models
from coordinator.http.openapi import openapi
from coordinator.http.request_id import RequestIds
from coordinator.http.tokens import Tokenizing
from kvrelay.errors import KVRelayError
from kvrelay.rpc.health import Readiness

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499


def make_app(door: FrontDoor, readiness: Readiness, authenticator: Authenticator) -> Starlette:
    generating, tokenizing = Generating(door), Tokenizing(door)
    models, health = Models(door), Health(readiness)
    routes = [
        Route("/v1/chat/completions", generating.chat, methods=["POST"]),
        Route("/v1/completions", generating.complete, methods=["POST"]),
        Route("/v1/responses", generating.respond, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.one),
        Route("/tokenize", tokenizing.tokenize, methods=["POST"]),
        Route("/detokenize", tokenizing.detokenize, methods=["POST"]),
        Route("/openapi.json", openapi),
        Route("/health", health.ready),
        Route("/ready", health.ready),
        Route("/live", health.live),
    ]
    handlers = {
        KVRelayError: _refuse,
        ClientLeftError: _say_nothing,
        HTTPException: _no_such_route,
        Exception: _failed,
    }
    middleware = [Middleware(RequestIds), Middleware(Callers, authenticator)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, KVRelayError)
    return error_response(error, getattr(request.state, "fields", ()))


async def _say_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:128]}"
    if error.status_code == NoMethodError.http_status:
        response = error_response(NoMethodError(f"{asked} is not served; the path takes other methods"))
        response.headers.update(error.headers or {})
        return response
    return error_response(NoRouteError(f"{asked} is not served here"))


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(KVRelayError("the coordinator failed; its log says why"))
