"""Runs one worker in a fresh process of its engine's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
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


class _Worker:
    def __init__(self, process: subprocess.Popen[str], complaints: IO[str], label: str) -> None:
        self._process = process
        self._complaints = complaints
        self._label = label

    def read(self) -> dict[str, Any]:
        """Its next line. Raises WorkerFailedError if it ends, or is ended, without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailedError(f"{self._label} ended with {self._process.wait()}: {self._last_words()}")
        fields: dict[str, Any] = json.loads(line)
        return fields

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _last_words(self) -> str:
        self._complaints.seek(0)
        return "\n".join(self._complaints.read().splitlines()[-_NUM_LINES_OF_COMPLAINT:])


@contextmanager
def _worker(engine: Engine, task: Task) -> Iterator[_Worker]:
    """Its process, ended with the block or after LIMIT_S."""
    task = replace(task, spawned_at=time.monotonic())
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(task.threads)}
    environment = {**os.environ, **own, **engine.environment}
    command: list[str | Path] = [engine.python, "-m", engine.worker, json.dumps(asdict(task))]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        ) as process,
    ):
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            yield _Worker(process, complaints, engine.label)
        finally:
            limit.cancel()
            process.kill()
