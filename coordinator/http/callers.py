"""Who is calling: known before anything else of a request is looked at, its path included."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.auth import Authenticator, bearer
from coordinator.http.errors import error_response
from coordinator.identity import Identity
from coordinator.identity import Scope as CallerScope
from kvrelay.errors import KVRelayError, UnauthenticatedError

OPEN_PATHS = frozenset(("/health", "/ready", "/live"))  # as they are written, and no others


class Callers:
    """ASGI middleware. Whoever proves to be nobody, or may not ask, hears nothing but that."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                scope["state"]["caller"] = self._identify(Headers(scope=scope))
            except KVRelayError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _identify(self, headers: Headers) -> Identity:
        shown = headers.getlist("authorization")
        if len(shown) > 1:
            raise UnauthenticatedError("the request has more than one authorization header")
        if not self._authenticator.knows_callers:
            return self._authenticator.identify(None)  # clients that must show a key show any
        identity = self._authenticator.identify(bearer(shown[0]) if shown else None)
        identity.check(CallerScope.INFER)
        return identity


def caller_of(request: Request) -> Identity:
    caller: Identity = request.state.caller
    return caller
