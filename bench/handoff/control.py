"""What a handoff does to small things on its connection: a unary call, and a stream that has a message each 10 ms."""

from __future__ import annotations

from bench.engine.table import percentile
from bench.handoff.pace import FULL, NONE
from bench.handoff.plan import CONTROL, Setting, command, start
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import num_blocks_of

SHAPE = "135M"
LINES = {"ping": "unary ping", "ticks": "gaps of a stream, 10 ms apart"}
DURING = {NONE: "no handoff", FULL: "full rate"}


def measure(setting: Setting, samples: Samples) -> None:
    """One round. Raises WorkerFailedError."""
    num_blocks = num_blocks_of(SHAPE)
    receiver = command("receiver", {"shape": SHAPE, "num_blocks": num_blocks + 1})
    with start("the receiver", receiver) as far:
        task = {"shape": SHAPE, "num_blocks": num_blocks, "peer_pid": far.pid, **far.read()}
        with start("the sender", command("sender", task)) as near:
            near.read()
            for what, line in LINES.items():
                for bytes_per_s in DURING:
                    report = near.ask(do=what, seconds=setting.effort.control_s, bytes_per_s=bytes_per_s)
                    for percent in (50, 99):
                        value = 1e3 * percentile(report["times_s"], percent)
                        samples.add(CONTROL, line, column(percent, bytes_per_s), value)


def column(percent: int, bytes_per_s: float) -> str:
    return f"p{percent} ms, {DURING[bytes_per_s]}"


def bars() -> list[Bar]:
    return [Bar("unary ping's p99 during a handoff, ms", (CONTROL, LINES["ping"], column(99, FULL)), most=5.0)]
