"""What tests start as a role behaves as a process that was started by itself."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm_process import WarmProcess

NEEDS = "import colorsys"
WAIT_S = 60.0


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "log"


class Started:
    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.processes: list[WarmProcess] = []

    def __call__(self, entry: str, *argv: str) -> WarmProcess:
        with self.log_path.open("ab") as log:
            self.processes.append(WarmProcess(NEEDS, entry, [*argv], log.fileno()))
        return self.processes[-1]


@pytest.fixture
def start(log_path: Path) -> Iterator[Started]:
    started = Started(log_path)
    yield started
    for process in started.processes:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        process.stdout.close()


def test_it_says_what_it_says_and_ends_with_its_exit_code(start: Started, log_path: Path) -> None:
    process = start("import sys; print(sys.argv); sys.stderr.write('oh'); sys.exit(3)", "one", "two")
    assert process.stdout.read() == b"['-c', 'one', 'two']\n"
    assert process.wait(WAIT_S) == process.poll() == 3
    assert log_path.read_text() == "oh"


def test_one_that_comes_to_its_end_exits_with_0_and_one_that_fails_with_1(start: Started, log_path: Path) -> None:
    assert start("pass").wait(WAIT_S) == 0
    assert start("1 / 0").wait(WAIT_S) == 1
    assert "ZeroDivisionError" in log_path.read_text()


def test_it_has_what_it_needs_before_it_begins_and_is_a_process_of_its_own(start: Started) -> None:
    say = "import os, sys; os.write(1, b'%d %d' % (os.getpid(), 'colorsys' in sys.modules))"
    first, second = start(say), start(say)
    assert (first.stdout.read(), second.stdout.read()) == (b"%d 1" % first.pid, b"%d 1" % second.pid)
    assert first.pid != second.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_is_its_exit_code(start: Started, number: signal.Signals) -> None:
    process = start("print('there', flush=True); import signal; signal.pause()")
    assert process.stdout.readline() == b"there\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.send_signal(number)
    assert process.wait(WAIT_S) == -number
    process.send_signal(number)  # to nobody
