"""Prefill and decode nodes as the processes they are, without a coordinator around them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine.launch import WorkerFailedError
from bench.handoff.plan import start

READY = "READY"


@dataclass(frozen=True, slots=True)
class Role:
    address: str
    metrics_port: int


@contextmanager
def role(name: str, model: Path, num_blocks: int, *options: str) -> Iterator[Role]:
    """A node of one thread that is ready. Raises WorkerFailedError."""
    metrics_port = _free_port()
    command = [sys.executable, "-m", "kvrelay.cli", name, "--model", str(model), "--dtype", "bfloat16"]
    command += ["--threads", "1", "--num-blocks", str(num_blocks), "--metrics-port", str(metrics_port), *options]
    with start(f"the {name}", command) as process:
        word, _, address = process.read_line().split()
        if word != READY:
            raise WorkerFailedError(f"the {name} says {word} and not {READY}")
        yield Role(address, metrics_port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
