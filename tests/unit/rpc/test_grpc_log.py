"""A peer that goes away at the very end of a call leaves a line in the log and no traceback."""

from __future__ import annotations

import logging

import pytest
from grpc._cython import cygrpc

from kvrelay.rpc import grpc_log

LOGGER = logging.getLogger("grpc._cython.cygrpc")


def log(error: Exception) -> None:
    try:
        raise error
    except Exception:
        LOGGER.exception("raised by servicer method [%s]", "/kvrelay.pb.KVTransfer/Receive")


def test_a_status_that_came_too_late_is_a_line_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    grpc_log.calm()
    grpc_log.calm()
    log(cygrpc.ExecuteBatchError("execute_batch", 1))

    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.INFO, None)
    assert record.getMessage() == (
        "a peer went away before it got a call's status: raised by servicer method [/kvrelay.pb.KVTransfer/Receive]"
    )


def test_where_lines_at_info_are_not_wanted_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    caplog.handler.setLevel(logging.DEBUG)  # as kvrelay's: the loggers decide
    grpc_log.calm()
    log(cygrpc.ExecuteBatchError("execute_batch", 1))
    assert caplog.records == []


def test_any_other_error_of_grpc_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    grpc_log.calm()
    log(ValueError("why"))

    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
