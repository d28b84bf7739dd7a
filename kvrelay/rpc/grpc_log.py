"""grpc's own log, less what it takes for an error and is none.

When a peer's connection dies while its call's status is being sent, grpc.aio logs a traceback although nothing is left
to do: the handler is over, and there is nobody to tell.
"""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("grpc._cython.cygrpc")
_LATE = "ExecuteBatchError"  # a private class of grpc's


def calm() -> None:
    """Makes one line at level info of each such traceback; more calls change nothing."""
    _LOGGER.addFilter(_without_departures)


def _without_departures(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == _LATE:
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "a peer went away before it got a call's status: %s", (record.getMessage(),)
        record.exc_info = None
        return _LOGGER.isEnabledFor(logging.INFO)  # which was asked for the level that it had
    return True
