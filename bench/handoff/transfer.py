"""Rates and CPU time of moving KV between two processes, beside a raw socket, bare gRPC and Mooncake's engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.engine.launch import Worker
from bench.handoff.pace import GB
from bench.handoff.plan import MOONCAKE, TRANSFER, Setting, command, start
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import LAYOUTS, column_of, num_blocks_of

RAW = "raw TCP socket, 1 MiB"
GRPC = "gRPC alone, 1 MiB, window of two"
KVRELAY = "kvrelay, checksums"
KVRELAY_TLS = "kvrelay, checksums, mutual TLS"


@dataclass(frozen=True, slots=True, eq=False)
class Mover:
    """Two kinds of worker and what both are told; `python` is theirs, if they have an environment of their own."""

    name: str
    receiver: str
    sender: str
    task: dict[str, object]
    python: Path | None = None


def measure(setting: Setting, samples: Samples) -> None:
    """One round: pairs of fresh processes, all there at once, one working at a time. Raises WorkerFailedError."""
    for shape in LAYOUTS:
        with ExitStack() as stack:
            for name, sender in _senders(_movers(setting, shape), stack).items():
                _add(samples, shape, name, sender.ask(do="transfer", seconds=setting.effort.transfer_s))


def _senders(movers: Sequence[Mover], stack: ExitStack) -> dict[str, Worker]:
    """By name, each connected to its receiver; all end with the stack. They start side by side: it saves seconds."""
    receivers = {
        mover: stack.enter_context(start(f"{mover.name} that receives", _receiving(mover))) for mover in movers
    }
    senders = {
        mover.name: stack.enter_context(start(f"{mover.name} that sends", _sending(mover, receiver)))
        for mover, receiver in receivers.items()
    }
    for sender in senders.values():
        sender.read()
    return senders


def _receiving(mover: Mover) -> list[str]:
    spare = {"num_blocks": int(str(mover.task["num_blocks"])) + 1} if "num_blocks" in mover.task else {}
    return command(mover.receiver, mover.task | spare, mover.python)


def _sending(mover: Mover, receiver: Worker) -> list[str]:
    return command(mover.sender, mover.task | receiver.read() | {"peer_pid": receiver.pid}, mover.python)


def _add(samples: Samples, shape: str, name: str, report: dict[str, float]) -> None:
    sender, receiver = report["sender_cpu_s"] * GB, report["receiver_cpu_s"] * GB
    samples.add(TRANSFER, name, _rate(shape), report["bytes_per_s"] / GB)
    samples.add(TRANSFER, name, f"{shape}: sender's CPU s/GB", sender)
    samples.add(TRANSFER, name, f"{shape}: receiver's", receiver)
    samples.add(TRANSFER, name, _cpu(shape), sender + receiver)


def _movers(setting: Setting, shape: str) -> list[Mover]:
    movers = [
        Mover(RAW, "raw_socket", "raw_socket", _memory(shape)),
        Mover(GRPC, "grpc_stream", "grpc_stream", _memory(shape) | {"window": 2}),
    ]
    if setting.mooncake.exists():
        movers.append(Mover(MOONCAKE, "mooncake_engine", "mooncake_engine", _memory(shape), setting.mooncake))
    movers.append(Mover(KVRELAY, "receiver", "sender", _blocks(shape)))
    if setting.tls is not None:
        tls = {"tls": [str(path) for path in setting.tls]}
        movers.append(Mover(KVRELAY_TLS, "receiver", "sender", _blocks(shape) | tls))
    return movers


def _memory(shape: str) -> dict[str, object]:
    slab_bytes = LAYOUTS[shape].slab_bytes
    return {"num_bytes": num_blocks_of(shape) * slab_bytes, "slab_bytes": slab_bytes}


def _blocks(shape: str) -> dict[str, object]:
    return {"shape": shape, "num_blocks": num_blocks_of(shape)}


def _rate(shape: str) -> str:
    return f"{column_of(shape)}: GB/s"


def _cpu(shape: str) -> str:
    return f"{shape}: both"


def bars() -> list[Bar]:
    found = []
    for shape in LAYOUTS:
        ours, raw, mooncake = ((TRANSFER, name, _rate(shape)) for name in (KVRELAY, RAW, MOONCAKE))
        tls = (TRANSFER, KVRELAY_TLS, _rate(shape))
        cpu, their_cpu = ((TRANSFER, name, _cpu(shape)) for name in (KVRELAY, MOONCAKE))
        found += [
            Bar(f"{shape}: rate over the raw socket's", ours, raw, least=0.55, aim=0.70),
            Bar(f"{shape}: rate over Mooncake's", ours, mooncake, least=1.0, aim=1.25),
            Bar(f"{shape}: CPU of both sides over Mooncake's", cpu, their_cpu, most=1.0),
            Bar(f"{shape}: with mutual TLS, over the raw socket's", tls, raw, least=0.30),
        ]
    return found
