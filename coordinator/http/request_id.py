"""A request's id: the client's own, or one made here; in every reply's X-Request-Id."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.errors import FieldError, error_response
from kvrelay.errors import InvalidRequestError
from kvrelay.rpc.convert_types import check_request_id

HEADER = "x-request-id"


class RequestIds:
    """ASGI middleware. An id that cannot be one is refused, and not sent back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = own = Headers(scope=scope).get(HEADER) or ""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        try:
            if own:
                check_request_id(own)
        except InvalidRequestError as error:
            state["request_id"] = _made()
            await error_response(error)(scope, receive, send_with_id)
            return
        state["request_id"] = own or _made()
        state["request_id_is_own"] = bool(own)
        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request, named: str | None) -> str:
    """`named` is what the body calls it. Raises InvalidRequestError where that is no id, or not the header's."""
    if not named:
        return str(request.state.request_id)
    check_request_id(named)
    if request.state.request_id_is_own and named != request.state.request_id:
        raise FieldError(f"request_id is {named!r}, but the header X-Request-Id says another one", "request_id")
    request.state.request_id = named
    return named


def _made() -> str:
    return secrets.token_hex(16)
