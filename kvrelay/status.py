"""`kvrelay status`: a look at a running cluster from the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvrelay.client import AsyncClient
from kvrelay.client_command import explain_failure, make_parser, run, size, write
from kvrelay.cluster import ClusterStatus, NodeReport
from kvrelay.errors import KVRelayError
from kvrelay.types import Role

DEFAULT_WATCH_S = 2.0
MIN_WATCH_S = 0.1
CLEAR_SCREEN = "\x1b[H\x1b[2J"

_WHY = "WHY NOT READY"  # last, while any node has a reason
_MODEL, _MODEL_COLUMN = "MODEL", 2  # where nodes serve different ones
_WEIGHT = "WEIGHT"  # before the reasons, while any is not 1
_HEADER = ("ROLE", "ADDRESS", "STATE", "RUNNING", "WAITING", "RESERVED", "BLOCKS free/reserved/held/cached", "TOTAL")


def main(argv: Sequence[str]) -> int:
    """Prints the cluster as the coordinator sees it; 1 with one line on stderr when it cannot be asked."""
    options = parser().parse_args(argv)
    return run("status", options.address, lambda: _status(options))


async def _status(options: argparse.Namespace) -> None:
    async with AsyncClient(options.address) as client:
        if options.watch is None:
            write(_shown(options, await client.status()))
        else:
            await _watch(client, options)


async def _watch(client: AsyncClient, options: argparse.Namespace) -> None:
    """Until it is interrupted, also while the coordinator is away."""
    before = CLEAR_SCREEN if sys.stdout.isatty() and not options.json else ""
    while True:
        try:
            shown = _shown(options, await client.status())
        except KVRelayError as error:
            sys.stderr.write(f"{before}kvrelay status: {explain_failure(error, options.address)}\n")
        else:
            write(before + shown)
        await asyncio.sleep(options.watch)


def _shown(options: argparse.Namespace, status: ClusterStatus) -> str:
    return (json.dumps(describe(status)) if options.json else table(options.address, status)) + "\n"


def describe(status: ClusterStatus) -> dict[str, Any]:
    """The object of --json."""
    return {
        "ready": status.ready,
        "num_queued": status.num_queued,
        "num_running": status.num_running,
        "nodes": [
            {
                "role": report.info.role.value,
                "address": report.info.address,
                "instance_id": report.info.instance_id,
                "model": report.info.model.name if report.info.model else None,
                **asdict(report.status),
                "age_s": report.age_s,
            }
            for report in _in_order(status)
        ],
    }


def table(address: str, status: ClusterStatus) -> str:
    state = "ready" if status.ready else "not ready"
    lines = [f"coordinator {address}: {state}, {status.num_running} running, {status.num_queued} queued"]
    if not status.nodes:
        return lines[0] + "\nno node has joined"
    reports = _in_order(status)
    rows = [_HEADER, *(_cells(report) for report in reports)]
    if len({_model(report) for report in reports if report.info.model}) > 1:
        rows = _with_column(rows, _MODEL_COLUMN, [_MODEL, *map(_model, reports)])
    if any(report.status.weight != 1 for report in reports):
        rows = _with_column(rows, len(rows[0]), [_WEIGHT, *map(_weight, reports)])
    if any(_why(report) for report in reports):
        rows = _with_column(rows, len(rows[0]), [_WHY, *map(_why, reports)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _in_order(status: ClusterStatus) -> list[NodeReport]:
    """By role, then by address: nodes join in any order, and the second look should find each where it was."""
    return sorted(status.nodes, key=_place)


def _place(report: NodeReport) -> tuple[int, str, int]:
    host, _, port = report.info.address.rpartition(":")
    return list(Role).index(report.info.role), host, int(port) if port.isdecimal() else 0


def _cells(report: NodeReport) -> tuple[str, ...]:
    status, blocks = report.status, report.status.blocks
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    if not blocks.total:
        held = f"memory {size(status.memory_bytes)}, disk {size(status.disk_bytes)}"
        return (report.info.role.value, report.info.address, state, "-", "-", "-", held, "-")
    counts = f"{blocks.free}/{blocks.reserved}/{blocks.held}/{blocks.cached}"
    numbers = (status.num_running, status.num_waiting, status.num_reservations)
    return (report.info.role.value, report.info.address, state, *map(str, numbers), counts, str(blocks.total))


def _with_column(rows: Sequence[tuple[str, ...]], at: int, cells: Sequence[str]) -> list[tuple[str, ...]]:
    return [(*row[:at], cell, *row[at:]) for row, cell in zip(rows, cells, strict=True)]


def _model(report: NodeReport) -> str:
    return report.info.model.name if report.info.model else "-"


def _weight(report: NodeReport) -> str:
    return f"{report.status.weight:g}" if report.info.model else "-"


def _why(report: NodeReport) -> str:
    """A node that drains says so as its state."""
    return "" if report.status.draining else report.status.not_ready_reason


def _pause(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not MIN_WATCH_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no pause; give seconds, {MIN_WATCH_S:g} at least")
    return seconds


def parser() -> argparse.ArgumentParser:
    parser = make_parser("status", "Show a running cluster: its nodes, their KV blocks, what waits and runs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead, a line each with --watch")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_pause,
        const=DEFAULT_WATCH_S,
        metavar="S",
        help=f"go on, looking again every S seconds, until Ctrl-C; default {DEFAULT_WATCH_S:g}",
    )
    return parser
