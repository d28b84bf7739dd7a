"""The processes that are measured: those that the end-to-end tests start, with what a benchmark asks of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engine.launch import WorkerFailedError
from tests.support.cluster import RoleProcess, free_port

__all__ = ["free_port", "store_process"]


@contextmanager
def store_process(*options: str) -> Iterator[RoleProcess]:
    """A kvstore that is ready, on a port that it keeps, alone. Raises WorkerFailedError."""
    logs = Path(tempfile.mkdtemp(prefix="kvrelay-bench-"))
    store = RoleProcess("kvstore", ["--port", str(free_port()), *options], logs / "kvstore.log")
    try:
        restart(store)
        yield store
    finally:
        if store.running:
            store.kill()
        shutil.rmtree(logs)


def restart(role: RoleProcess) -> None:
    """Raises WorkerFailedError."""
    try:
        role.restart()
    except (RuntimeError, TimeoutError) as error:
        raise WorkerFailedError(str(error)) from error
