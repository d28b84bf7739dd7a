"""Rates and CPU time of moving KV between two processes, beside a raw socket and Mooncake's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.engine.launch import Worker, started
from bench.handoff.pace import GB
from bench.handoff.plan import MOONCAKE, TRANSFER, Setting, command
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import LAYOUTS, column_of, num_blocks_of

RAW = "raw TCP socket, 1 MiB"
KVRELAY = "kvrelay, checksums"
KVRELAY_TLS = "kvrelay, checksums, mutual TLS"


def measure(setting: Setting, samples: Samples) -> None:
    """One round: pairs of fresh processes, all there at once, one working at a time. Raises WorkerFailedError."""
    for shape in LAYOUTS:
        with ExitStack() as stack:
            pairs = {name: stack.enter_context(pair) for name, pair in _pairs(setting, shape)}
            for name, sender in pairs.items():
                _add(samples, shape, name, sender.ask(do="transfer", seconds=setting.effort.transfer_s))


def _add(samples: Samples, shape: str, name: str, report: dict[str, float]) -> None:
    sender, receiver = report["sender_cpu_s"] * GB, report["receiver_cpu_s"] * GB
    samples.add(TRANSFER, name, _rate(shape), report["bytes_per_s"] / GB)
    samples.add(TRANSFER, name, f"{shape}: sender's CPU s/GB", sender)
    samples.add(TRANSFER, name, f"{shape}: receiver's", receiver)
    samples.add(TRANSFER, name, _cpu(shape), sender + receiver)


def _pairs(setting: Setting, shape: str) -> Iterator[tuple[str, ExitStack]]:
    yield RAW, _pair("raw_socket", "raw_socket", _memory(shape), setting)
    if setting.mooncake.exists():
        yield MOONCAKE, _pair("mooncake_engine", "mooncake_engine", _memory(shape), setting)
    yield KVRELAY, _pair("receiver", "sender", _blocks(shape), setting)
    if setting.tls is not None:
        tls = {"tls": [str(path) for path in setting.tls]}
        yield KVRELAY_TLS, _pair("receiver", "sender", _blocks(shape) | tls, setting)


@contextmanager
def _pair(receiver: str, sender: str, task: dict[str, object], setting: Setting) -> Iterator[Worker]:
    """The sending process, which has met the receiving one."""
    python = setting.mooncake if receiver == "mooncake_engine" else None
    spare = {"num_blocks": task["num_blocks"] + 1} if "num_blocks" in task else {}
    with started(f"the {receiver} that receives", command(receiver, task | spare, python)) as far:
        task = task | far.read() | {"peer_pid": far.pid}
        with started(f"the {sender} that sends", command(sender, task, python)) as near:
            near.read()
            yield near


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
