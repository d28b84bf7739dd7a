"""The processes that are measured: a coordinator as it is, between nodes and a client that are made up."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.coordinator.plan import Setting
from bench.engine.launch import Worker, WorkerFailedError, started

NUM_PREFILL = 2
NUM_DECODE = 4
NUM_BLOCKS = 2**31  # of a decode node that always has room
BEGIN_PACE = 1.0  # tokens a second of each answer while others have yet to begin
MAX_QUEUE = 2_000
LIMIT_S = 300.0  # of one process: a part takes a minute
READY = "READY"

start = partial(started, limit_s=LIMIT_S)


@dataclass(frozen=True, slots=True)
class Ends:
    nodes: Worker
    client: Worker

    def stream(
        self, num_streams: int, tokens_per_s: float, seconds: float, *, straight: bool = False
    ) -> dict[str, Any]:
        """What comes in so long of so many answers that all have begun; `straight` from the nodes."""
        self.set_pace(BEGIN_PACE)
        self.client.ask(do="open", num_streams=num_streams, straight=straight)
        self.set_pace(tokens_per_s)
        report = self.client.ask(do="watch", seconds=seconds)
        self.client.ask(do="close")
        return report

    def set_pace(self, tokens_per_s: float) -> None:
        """Of each answer, from its next token on; 0: as fast as it goes."""
        self.nodes.ask(tokens_per_s=tokens_per_s)


@contextmanager
def ends(setting: Setting, *options: str, num_blocks: int = NUM_BLOCKS) -> Iterator[Ends]:
    """A coordinator, of `options`, with nodes that have `num_blocks` each, and a client. Raises WorkerFailedError.

    Its queue takes MAX_QUEUE, unless an option says otherwise, so that all answers of a measurement may begin at once.
    """
    port = _free_port()
    words = [sys.executable, "-m", "kvrelay.cli", "coordinator", "--model", str(setting.model), "--port", str(port)]
    words += ["--max-queue", str(MAX_QUEUE), "--http-port", "-1"]
    with (
        start("the coordinator", [*words, *options]) as coordinator,
        _nodes(num_blocks, f"127.0.0.1:{port}") as (nodes, decode),
    ):
        word, _, address = coordinator.read_line().split()
        if word != READY:
            raise WorkerFailedError(f"the coordinator says {word} and not {READY}")
        with _client(coordinator, nodes, address=address, decode=decode) as client:
            yield Ends(nodes, client)


@contextmanager
def ends_of_grpc_alone() -> Iterator[Ends]:
    """As `ends`, with a process in the coordinator's place that passes the nodes' messages on as they are."""
    with (
        _nodes(NUM_BLOCKS) as (nodes, decode),
        start("gRPC alone", _command("relay", {"decode": decode})) as relay,
        _client(relay, nodes, address=relay.read()["address"], decode=decode) as client,
    ):
        yield Ends(nodes, client)


@contextmanager
def _nodes(num_blocks: int, *coordinators: str) -> Iterator[tuple[Worker, list[str]]]:
    task = {"coordinators": coordinators, "prefill": NUM_PREFILL, "decode": NUM_DECODE, "num_blocks": num_blocks}
    with start("the nodes", _command("nodes", task)) as nodes:
        yield nodes, nodes.read()["decode"]


@contextmanager
def _client(between: Worker, nodes: Worker, **task: object) -> Iterator[Worker]:
    pids = {"between": between.pid, "nodes": nodes.pid}
    with start("the client", _command("client", {"pids": pids, **task})) as client:
        client.read()
        yield client


def _command(worker: str, task: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", f"bench.coordinator.workers.{worker}", json.dumps(task)]


def _free_port() -> int:
    """None of those that the system gives to outgoing connections: one might have it when the coordinator starts."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_outgoing // 2, first_outgoing)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
