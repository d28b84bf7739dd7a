"""What one run measures, how long, and where its files lie."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.engine.launch import started

# Rows by the names that --rows takes.
TTFT = "ttft"
RATES = "rates"
REQUESTS = "requests"
CHURN = "churn"
REPLAY = "replay"
ROWS = (TTFT, RATES, REQUESTS, CHURN, REPLAY)

MIB = 2**20
FILL = 0.8  # of LMDB's file, that records may take
LIMIT_S = 300.0  # of one worker


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: --quick only shows that everything runs."""

    prefix_tokens: int = 2_000
    num_prompts: int = 2  # of that prefix
    short_prefixes: tuple[int, ...] = (16, 32, 48, 64, 128, 256)
    num_short: int = 2  # prompts of each
    rate_s: float = 0.5
    request_tokens: int = 384  # of the prompts that are asked beside a store that is busy, or has a fault
    map_bytes: int = 128 * MIB
    num_rounds: int = 3


QUICK = Effort(256, 2, (16, 64), 1, 0.1, 128, 32 * MIB, 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """`directory` is on the disk that is measured. `redis` is its server's program; None: it is not here."""

    effort: Effort
    model: Path
    directory: Path
    redis: Path | None


start = partial(started, limit_s=LIMIT_S)


def command(worker: str, task: dict[str, object]) -> list[str]:
    """Of a worker in bench.store.workers."""
    return [sys.executable, "-m", f"bench.store.workers.{worker}", json.dumps(task)]
