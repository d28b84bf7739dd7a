"""Processes forked from one that has imported what they import, torch above all: two seconds of each node's start.

A forked process has its own memory, files, signals and exit code like any other. It differs in what Python draws once a
process, the seed of its hashes, which all forks share: tests of what several processes must agree on start theirs anew
(`Cluster.fresh`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parents[2]
IMPORTS_WITHIN_S = 180.0  # two cores may be shared by much else
NUM_FILES = 3  # of a message: the child's stdout, its stderr, and where its pid and exit code are told
MAX_MESSAGE_BYTES = 65_536


class WarmProcess:
    """The part of `subprocess.Popen` that tests use of a role."""

    def __init__(self, needs: str, entry: str, argv: list[str], stderr_fd: int) -> None:
        """`needs` is Python that has run in what this is forked from; `entry` runs as by `python -c`, `argv` follows
        it. Returns before the process is there."""
        out, out_of_child = os.pipe()
        told, told_by_keeper = os.pipe()
        message = json.dumps({"entry": entry, "argv": argv}).encode()
        socket.send_fds(_nursery(needs).requests, [message], [out_of_child, stderr_fd, told_by_keeper])
        os.close(out_of_child)
        os.close(told_by_keeper)
        self.stdout: BinaryIO = os.fdopen(out, "rb", buffering=0)
        self._told = os.fdopen(told, "rb", buffering=0)
        self._words: list[int] = []  # its pid, then its exit code

    def __del__(self) -> None:
        self._told.close()

    @property
    def pid(self) -> int:
        if not self._listen(1, IMPORTS_WITHIN_S):
            raise TimeoutError(f"no process was forked within {IMPORTS_WITHIN_S:.0f} s")
        return self._words[0]

    def poll(self) -> int | None:
        return self._words[1] if self._listen(2, 0.0) else None

    def wait(self, timeout_s: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._listen(2, timeout_s):
            raise subprocess.TimeoutExpired("a forked process", timeout_s)
        return self._words[1]

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _listen(self, num_words: int, timeout_s: float) -> bool:
        """Whether so much has been told by then."""
        deadline = time.monotonic() + timeout_s
        while len(self._words) < num_words:
            if not select.select([self._told], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            word = self._told.readline()
            if not word:
                raise RuntimeError("what forks processes for tests has died")
            self._words.append(int(word))
        return True


@dataclass(frozen=True, slots=True)
class _Nursery:
    """The process that forks; it ends when the socket is closed, as by the end of this process."""

    process: subprocess.Popen[bytes]
    requests: socket.socket


@cache
def _nursery(needs: str) -> _Nursery:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{needs}; from tests.support import warm_process; warm_process.serve()"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            # OpenBLAS's threads, of which a forked process would have none.
            env=dict(os.environ, PYTHONPATH=str(ROOT), OPENBLAS_NUM_THREADS="1"),
            cwd=ROOT,
        )
    return _Nursery(process, ours)


def serve() -> None:
    """Forks as told by stdin, until nobody is there."""
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise RuntimeError(f"{num_threads} threads: a fork has one of them only")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end first
    gc.freeze()  # else a collection in a child copies all of this
    requests = socket.socket(fileno=os.dup(0))
    while True:
        message, files, _, _ = socket.recv_fds(requests, MAX_MESSAGE_BYTES, NUM_FILES)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(json.loads(message), *files)
            return
        for file in files:
            os.close(file)


def _keep(request: dict[str, str | list[str]], stdout: int, stderr: int, told: int) -> None:
    """Forks the process and tells of it; returns in the process, once it is over, so that Python ends as usual."""
    child = os.fork()
    if child == 0:
        os.close(told)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        sys.argv = ["-c", *request["argv"]]
        exec(compile(str(request["entry"]), "<string>", "exec"), {"__name__": "__main__"})
        return
    os.close(stdout)  # else nobody would see its end
    os.close(stderr)
    with contextlib.suppress(BrokenPipeError):  # the test has ended
        os.write(told, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)
