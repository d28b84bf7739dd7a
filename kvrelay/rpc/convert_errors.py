"""Errors of the tree to `Error` of types.proto and back."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay import errors
from kvrelay.errors import KVRelayError
from kvrelay.pb import types_pb2


def _error_classes(root: type[KVRelayError]) -> Iterable[type[KVRelayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_classes(child)


_ERRORS_BY_CODE = {cls.code: cls for cls in _error_classes(KVRelayError) if cls.__module__ == errors.__name__}


def error_to_pb(error: KVRelayError, *, message: str | None = None) -> types_pb2.Error:
    """`message` replaces the error's own, for doors that bound its length."""
    return types_pb2.Error(
        code=error.code,
        message=error.message if message is None else message,
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
    )


def error_from_pb(wire: types_pb2.Error) -> KVRelayError:
    """A code that is not known here gives a KVRelayError that carries it."""
    error = _ERRORS_BY_CODE.get(wire.code, KVRelayError)(wire.message, retry_after_s=wire.retry_after_s)
    if error.code != wire.code:
        error.code, error.retryable = wire.code, wire.retryable
    return error
