"""A run in which nothing happened shows nothing, and is told apart from one in which all was well."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from kvrelay.types import Role
from tests.chaos.asks import Ask
from tests.chaos.evidence import too_little
from tests.chaos.faults import FaultRecord
from tests.chaos.load import Outcome, Try
from tests.chaos.plan import Fault, Kind, Victim
from tests.chaos.strikes import is_stopped, num_connections

ANSWERED, LEFT, FAILED, STALLED = Outcome.ANSWERED, Outcome.LEFT, Outcome.FAILED, Outcome.STALLED


def tries(*of_each: list[Outcome]) -> list[Try]:
    """What became of one client's requests, sent once or, after a failure, twice."""
    return [
        Try(Ask(0, number, 0, 0, 0.0), coordinator, 0.0, [], outcome=outcome)
        for number, outcomes in enumerate(of_each)
        for coordinator, outcome in enumerate(outcomes)
    ]


WELL = tries(*[[ANSWERED]] * 50, *[[FAILED, ANSWERED]] * 50, *[[LEFT]] * 50)


def fault(kind: Kind, role: Role, index: int = 0) -> Fault:
    return Fault(0, 0.0, kind, Victim(role, index), 1.0)


KILL, CUT = fault(Kind.KILL, Role.DECODE_NODE), fault(Kind.CUT, Role.KVSTORE)


def test_a_run_with_answers_and_faults_shows_something() -> None:
    missed, struck = FaultRecord(KILL, 1.0), FaultRecord(KILL, 9.0, struck=True)
    assert too_little(WELL, [KILL, KILL, CUT], [missed, struck]) == []


@pytest.mark.parametrize(
    ("of_each", "says"),
    [
        ([], "only 0 of 0 requests were answered in the end"),
        ([[LEFT]] * 9, "only 0 of 0 requests were answered in the end"),
        ([[ANSWERED]] * 89 + [[FAILED, FAILED]] * 11, "only 89 of 100 requests were answered in the end"),
        ([[ANSWERED]] * 94 + [[STALLED]] * 6, "6 of 100 requests failed because the machine stood still"),
    ],
)
def test_answers_are_demanded(of_each: list[list[Outcome]], says: str) -> None:
    assert too_little(tries(*of_each), [], []) == [says]


def test_faults_are_demanded() -> None:
    assert too_little(WELL, [KILL, CUT, CUT], [FaultRecord(KILL, 1.0, struck=True)]) == [
        "only 1 of 3 planned faults were reached"
    ]
    assert too_little(WELL, [KILL], [FaultRecord(KILL, 1.0)]) == ["kill never struck a decode-node"]


def test_a_process_that_was_stopped_is_told_from_one_that_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(child.pid)
        child.kill()


def test_connections_to_a_port_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert num_connections(port) == 0
        with socket.create_connection(("127.0.0.1", port)):
            assert num_connections(port) == 1
