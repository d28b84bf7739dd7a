"""What one run measures, how long, and with which processes where."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.engine.launch import started
from bench.handoff.pace import FULL, MB

# Rows by the names that --rows takes.
TRANSFER = "transfer"
CONTROL = "control"
RECEIVER_PROCESS = "receiver-process"
TAIL = "tail"
JITTER = "jitter"
ROWS = (TRANSFER, CONTROL, RECEIVER_PROCESS, TAIL, JITTER)

STEADY = 300 * MB  # bytes a second
PREFILL_PACE = 25 * MB  # what one prefill node on this kind of machine computes in a second
DECODE_LOADS = (0.0, STEADY, FULL)
JITTER_LOADS = (0.0, PREFILL_PACE, FULL)
MOONCAKE = "Mooncake"
LIMIT_S = 300.0  # of one process: a part takes a minute
SENDER_NICENESS = 10  # where the sender shares a core with who looks at the clock: it is another machine's work


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: --quick only shows that everything runs."""

    transfer_s: float = 1.0
    control_s: float = 2.0
    decode_steps: int = 96
    jitter_s: float = 4.0
    tail_tokens: tuple[int, ...] = (512, 1024, 2048, 4096, 8128)
    jitter_tokens: int = 6144
    num_rounds: int = 3


QUICK = Effort(0.2, 0.5, 16, 1.5, (64, 512), 1024, 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """`cpus` are at least two: the first decodes where decoding is timed, the others have everything else."""

    effort: Effort
    model: Path
    peers: Path  # directory of the peers' environments
    tls: tuple[Path, Path, Path] | None  # CA, certificate, key
    cpus: tuple[int, ...]

    @property
    def mooncake(self) -> Path:
        """Its environment's interpreter, there or not."""
        return self.peers / "mooncake" / "bin" / "python"

    @property
    def engine_cpus(self) -> tuple[int, ...]:
        return self.cpus[:1]

    @property
    def other_cpus(self) -> tuple[int, ...]:
        return self.cpus[1:]


start = partial(started, limit_s=LIMIT_S)


def command(worker: str, task: dict[str, object], python: Path | None = None, niceness: int = 0) -> list[str]:
    """Of a worker in bench.handoff.workers."""
    nice = ["nice", "-n", str(niceness)] if niceness else []
    return [*nice, str(python or sys.executable), "-m", f"bench.handoff.workers.{worker}", json.dumps(task)]
