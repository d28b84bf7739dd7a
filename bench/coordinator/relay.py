"""Tokens from nodes to clients: how many a second of the coordinator's CPU time, beside gRPC alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from bench.coordinator.plan import RELAY, Setting
from bench.coordinator.processes import Ends, ends, ends_of_grpc_alone
from bench.handoff.samples import Bar, Samples

NUM_STREAMS = (1, 100, 1_000)
FULL = 0.0  # pace: as fast as it goes
OURS = "coordinator"
GRPC_ALONE = "gRPC alone"
ON_ONE_CORE = "tokens a CPU second"
MICROSECONDS = "us a token"


def measure(setting: Setting, samples: Samples, _: int) -> None:
    """One round. Raises WorkerFailedError."""
    for name, processes in ((OURS, lambda: ends(setting)), (GRPC_ALONE, ends_of_grpc_alone)):
        _measure(name, processes(), setting, samples)


def _measure(name: str, processes: AbstractContextManager[Ends], setting: Setting, samples: Samples) -> None:
    with processes as both:
        for num_streams in NUM_STREAMS:
            report = both.stream(num_streams, FULL, setting.effort.relay_s)
            note(report, RELAY, line_of(name, num_streams), samples)


def note(report: dict[str, Any], table: str, line: str, samples: Samples) -> None:
    """What relaying took. The shares tell which process was as busy as one core allows."""
    num_tokens, cpu_s, wall_s = report["num_tokens"], report["cpu_s"], report["wall_s"]
    samples.add(table, line, ON_ONE_CORE, num_tokens / cpu_s["between"])
    samples.add(table, line, MICROSECONDS, 1e6 * cpu_s["between"] / num_tokens)
    samples.add(table, line, "tokens/s", num_tokens / wall_s)
    samples.add(table, line, "tokens an event", num_tokens / report["num_events"])
    for process in ("between", "nodes", "client"):
        samples.add(table, line, f"CPUs, {process}", cpu_s[process] / wall_s)


def line_of(name: str, num_streams: int) -> str:
    return f"{name}, {num_streams:,} stream{'s' if num_streams > 1 else ''}"


def bars() -> list[Bar]:
    ours, floor = (RELAY, line_of(OURS, 100), ON_ONE_CORE), (RELAY, line_of(GRPC_ALONE, 100), ON_ONE_CORE)
    return [
        Bar("tokens relayed in a CPU second, 100 streams", ours, least=15_000),
        Bar("the same over gRPC alone", ours, floor, least=0.5),
    ]
