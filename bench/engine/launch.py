"""Runs workers in fresh processes, each in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from bench.engine.case import Sample, Task
from bench.engine.engines import Engine

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1800.0
_NUM_LINES_OF_COMPLAINT = 12


class WorkerFailedError(Exception):
    """A worker ended without its report; the message has the end of what it said."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker found. Samples by the case's name."""

    samples: dict[str, Sample]
    ready_s: float  # from the start of the process to the first token of a prompt of 8
    peak_rss_bytes: int
    facts: dict[str, int | str]
    versions: dict[str, str]


def run_worker(engine: Engine, task: Task) -> Report:
    """Raises WorkerFailedError."""
    with _worker(engine, task) as worker:
        fields = worker.read()
    samples = {
        name: Sample(sample["tokens_per_s"], tuple(sample["gaps_s"])) for name, sample in fields["samples"].items()
    }
    return Report(**(fields | {"samples": samples}))


@contextmanager
def busy_worker(engine: Engine, task: Task) -> Iterator[list[float]]:
    """One that prefills without end while the block runs; the list gets its tokens a second after the block."""
    tokens_per_s: list[float] = []
    with _worker(engine, replace(task, busy=True)) as worker:
        worker.read()  # it is ready
        yield tokens_per_s
        worker.close_stdin()
        tokens_per_s.append(worker.read()["tokens_per_s"])


class Worker:
    """A process that is told what to do by its standard input and answers on its standard output, line by line."""

    def __init__(self, process: subprocess.Popen[str], complaints: IO[str], label: str) -> None:
        self._process = process
        self._complaints = complaints
        self._label = label

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_line(self) -> str:
        """Its next line. Raises WorkerFailedError if it ends, or is ended, without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailedError(f"{self._label} ended with {self._process.wait()}: {self._last_words()}")
        return line

    def read(self) -> dict[str, Any]:
        """Its next line, which is JSON. Raises as `read_line`."""
        fields: dict[str, Any] = json.loads(self.read_line())
        return fields

    def ask(self, **fields: object) -> dict[str, Any]:
        """Tells it one line and reads its answer. Raises WorkerFailedError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading tells why
        return self.read()

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _last_words(self) -> str:
        self._complaints.seek(0)
        return "\n".join(self._complaints.read().splitlines()[-_NUM_LINES_OF_COMPLAINT:])


@contextmanager
def started(
    label: str,
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    cpus: Iterable[int] = (),
    pass_fds: Collection[int] = (),
    limit_s: float = LIMIT_S,
) -> Iterator[Worker]:
    """A worker's process, ended with the block or after `limit_s`. `cpus` are the only ones it may use; none: any."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            pass_fds=pass_fds,
        ) as process,
    ):
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        try:
            if cpus:
                os.sched_setaffinity(process.pid, cpus)  # long before it has threads, which inherit it
            yield Worker(process, complaints, label)
        finally:
            limit.cancel()
            process.kill()


@contextmanager
def _worker(engine: Engine, task: Task) -> Iterator[Worker]:
    task = replace(task, spawned_at=time.monotonic())
    environment = {"OMP_NUM_THREADS": str(task.threads), **engine.environment}
    command: list[str | Path] = [engine.python, "-m", engine.worker, json.dumps(asdict(task))]
    with started(engine.label, command, environment) as worker:
        yield worker
