"""One role as a child process: started, watched, its log kept, ended."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

READY_PREFIX = "READY "  # a role prints "READY <role> <address>" on stdout once it serves
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RoleReady:
    role: RoleProcess
    address: str


@dataclass(frozen=True, slots=True)
class RoleExited:
    """`returncode` as subprocess gives it: minus the signal that killed it."""

    role: RoleProcess
    returncode: int


class RoleProcess:
    """`report` is called on the event loop with a RoleReady at most once and, in the end, a RoleExited."""

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, report: Callable[[RoleReady | RoleExited], None]
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.pid = 0
        self.returncode: int | None = None
        self._command = command
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Its stderr goes to the log, its stdout is read for READY and logged too. Raises OSError."""
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then drains in order
                preexec_fn=_die_with_parent(),
            )
        self.pid = self._process.pid
        self._watch = asyncio.create_task(self._read(self._process), name=f"watch {self.name}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with self.log_path.open("ab", buffering=0) as log:
            async for line in process.stdout:
                log.write(line)
                text = line.decode("utf-8", "replace").strip()
                if text.startswith(READY_PREFIX):
                    self._report(RoleReady(self, text.split()[-1]))
        self.returncode = await process.wait()
        self._report(RoleExited(self, self.returncode))

    @property
    def running(self) -> bool:
        return self._watch is not None and self.returncode is None

    def send(self, number: signal.Signals) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(number)

    async def exited(self) -> None:
        """Returns when the process has ended, at once if it never started."""
        if self._watch is not None:
            await asyncio.shield(self._watch)

    def last_log_lines(self, count: int) -> list[str]:
        with self.log_path.open("r", encoding="utf-8", errors="replace") as log:
            return [line.rstrip("\n") for line in deque(log, maxlen=count)]


def _die_with_parent() -> Callable[[], None] | None:
    """Runs in the child before exec: the kernel sends SIGTERM when the launcher dies, however it dies."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return arm
