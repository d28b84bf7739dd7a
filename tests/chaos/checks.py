"""What must be so when the load has ended and every fault is over."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.cluster import ClusterStatus
from kvrelay.types import Role
from tests.chaos.cluster import ChaosCluster, has_fresh
from tests.chaos.memory import MemoryWatch

QUIET_LIMIT_S = 20.0  # a lease is 10 s
READY_TIMEOUT_S = 5.0
POLL_S = 0.2
OPEN_CALLS = "kvrelay_rpc_calls_open"


async def still_held(cluster: ChaosCluster) -> list[str]:
    """Waits until nothing is held, leased, queued, running or missing; what still is after QUIET_LIMIT_S."""
    held: list[str] = []
    try:
        async with asyncio.timeout(QUIET_LIMIT_S):
            while True:
                held = await _held_now(cluster)
                if not held:
                    return []
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return held


async def not_ready(cluster: ChaosCluster) -> list[str]:
    """Processes whose own readiness is not true."""
    wrong = []
    for victim, address in cluster.addresses.items():
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                reply = await check(health_pb2.HealthCheckRequest(), timeout=READY_TIMEOUT_S)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                wrong.append(f"{victim.name} is not ready")
        except grpc.aio.AioRpcError as error:
            wrong.append(f"{victim.name} does not tell whether it is ready: {error.code().name} {error.details()}")
    return wrong


def tracebacks(cluster: ChaosCluster) -> list[str]:
    """Of every log, whole."""
    return [
        f"{victim.name}'s log has {count} tracebacks; the first:\n{first_traceback(text)}"
        for victim, process in cluster.processes.items()
        if (count := (text := read(process.log_path)).count("Traceback (most recent call last)"))
    ]


def first_traceback(text: str, num_lines: int = 40) -> str:
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line)
    return "\n".join(lines[max(0, at - 2) : at + num_lines])


def grown(cluster: ChaosCluster, memory: MemoryWatch) -> list[str]:
    wrong = []
    for victim, process in cluster.processes.items():
        assert process.process is not None
        growth = memory.growth(victim, process.process.pid)
        if not growth.is_bounded:
            assert growth.warm_bytes is not None
            wrong.append(
                f"{victim.name} has {growth.end_bytes / 2**20:.0f} MiB, and had {growth.warm_bytes / 2**20:.0f} MiB "
                f"once warm: more than the {growth.allowed_bytes / 2**20:.0f} MiB allowed"
            )
    return wrong


async def _held_now(cluster: ChaosCluster) -> list[str]:
    held = []
    for coordinator in cluster.coordinators:
        status = await cluster.status(coordinator)
        if status is None:
            held.append(f"{coordinator.name} does not answer")
        else:
            held += [f"{coordinator.name}: {what}" for what in _held(cluster, status)]
    held += await asyncio.to_thread(_open_streams, cluster)
    return held


def _held(cluster: ChaosCluster, status: ClusterStatus) -> list[str]:
    held = [] if status.ready else ["not ready"]
    if status.num_queued or status.num_running:
        held.append(f"{status.num_queued} requests queued and {status.num_running} running")
    for node in cluster.nodes:
        if not has_fresh(status, cluster.addresses[node]):
            held.append(f"{node.name} is no member that is ready")
    for report in status.nodes:
        one, blocks = report.status, report.status.blocks
        if one.num_reservations or one.num_running or one.num_waiting:
            held.append(
                f"{report.info.address} has {one.num_reservations} reservations, {one.num_running} running and "
                f"{one.num_waiting} waiting"
            )
        if report.info.role is not Role.KVSTORE and blocks.free + blocks.cached != blocks.total:
            held.append(f"{report.info.address} holds blocks: {blocks}")
    return held


def _open_streams(cluster: ChaosCluster) -> list[str]:
    """Calls that processes still serve, other than the streams of members and of answers, which stay open."""
    held = []
    for victim, process in cluster.processes.items():
        try:
            staying = sum(process.metric(OPEN_CALLS, method=method) for method in ("Join", "Decode"))
            num_open = process.metric(OPEN_CALLS) - staying
        except OSError as error:
            held.append(f"{victim.name} gives no metrics: {error}")
            continue
        if num_open:
            held.append(f"{victim.name} serves {num_open:.0f} calls")
    return held


def warnings_of(path: Path) -> int:
    return len(re.findall(r" (?:WARNING|ERROR) ", read(path)))


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
