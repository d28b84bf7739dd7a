"""Errors of the tree to `Error` of types.proto and back."""

from __future__ import annotations

from kvrelay.errors import KVRelayError, error_of
from kvrelay.pb import types_pb2


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
    return error_of(wire.code, wire.message, retryable=wire.retryable, retry_after_s=wire.retry_after_s)
