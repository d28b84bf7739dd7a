"""kill -9 in the middle of puts, 200 times: what was acknowledged is there, and nothing else ever is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.killed_store import MAX_LIVES, STEP

MAX_LIFE_S = 0.05  # after the store has opened: about ten transactions


class Nursery:
    """The process that forks the stores to be killed: to import everything once is ten times faster."""

    def __init__(self, path: Path) -> None:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "tests.support.killed_store", str(path)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )

    def line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().split()

    def begin(self, start: int) -> int:
        """The pid of a store that will put blocks from that number on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{start}\n".encode())
        self._process.stdin.flush()
        word, pid = self.line()
        assert word == "pid"
        return int(pid)

    def close(self) -> None:
        """With the store that lives, if a test failed meanwhile."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def nursery(tmp_path: Path):  # type: ignore[no-untyped-def]
    nursery = Nursery(tmp_path / "store")
    yield nursery
    nursery.close()


def test_a_store_that_is_killed_again_and_again_never_lies_and_forgets_nothing(nursery: Nursery) -> None:
    choices = random.Random(5)
    last_written: int | None = None
    num_written = 0
    for life in range(MAX_LIVES):
        pid = nursery.begin(life * STEP)
        word, *held = nursery.line()
        assert word == "proven", f"life {life}: {' '.join(held)}"
        assert last_written is None or str(last_written) in held, f"life {life}: block {last_written} is lost"
        killer = threading.Timer(choices.uniform(0.0, MAX_LIFE_S), os.kill, (pid, signal.SIGKILL))
        killer.start()
        while (words := nursery.line()) != ["dead"]:
            assert words[0] == "written", f"life {life}: {' '.join(words)}"
            last_written, num_written = int(words[1]), num_written + 1
        killer.join()
    assert num_written > MAX_LIVES  # they were killed at work, not before it
