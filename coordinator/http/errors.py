"""Errors in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from typing import Any

from starlette.responses import JSONResponse

from kvrelay.errors import InvalidRequestError, KVRelayError, UnauthenticatedError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class FieldError(InvalidRequestError):
    """A field of a body is unknown, not served, or not what it must be; `field` is where, as messages[0].content."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class BodyTooLargeError(InvalidRequestError):
    code = "request_too_large"
    http_status = 413


class BodyTooSlowError(InvalidRequestError):
    code = "request_timeout"
    http_status = 408


class NoRouteError(InvalidRequestError):
    code = "not_found"
    http_status = 404


class NoMethodError(InvalidRequestError):
    code = "method_not_allowed"
    http_status = 405


class ClientLeftError(Exception):
    """Nobody is there to hear an answer."""


def error_body(error: KVRelayError, fields: Container[str] = ()) -> dict[str, Any]:
    """`fields` are those of the body: messages of other rooms begin with the one that they are about."""
    status = error.http_status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    field = error.field if isinstance(error, FieldError) else _named_first(error.message, fields)
    return {"error": {"message": error.message, "type": kind, "param": field, "code": error.code}}


def _named_first(message: str, fields: Container[str]) -> str | None:
    word = re.match(r"\w*", message)
    return word[0] if word is not None and word[0] in fields else None


def error_response(error: KVRelayError, fields: Container[str] = ()) -> JSONResponse:
    """`Retry-After` counts whole seconds; `x-should-retry` is what OpenAI's clients go by."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.http_status == UnauthenticatedError.http_status:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s > 0:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_body(error, fields), error.http_status, headers)
