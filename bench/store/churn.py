"""LMDB under five times its map's size: whether the file grows, and whether what is asked for often stays.

A stream of chains, drawn by Zipf's law from four times as many as fit, each got as far as the store has it and put
where it ends. Counted by fifths of what was put, beside the books of the same policy without any bytes.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench.handoff.samples import Bar, Samples
from bench.store.plan import CHURN, FILL, MIB, Setting, command, start
from bench.store.processes import store_process

NUM_TURNS = 5
FILE = "file at the end, MiB"
HIT_RATE = "blocks found, %"
ALONE = "by the policy alone, %"
PUT_RATE = "MB/s put"
MAP = "map's bound, MiB"


def measure(setting: Setting, samples: Samples, round_number: int) -> None:
    """One round. Raises WorkerFailedError."""
    path = Path(tempfile.mkdtemp(prefix="churn-", dir=setting.directory))
    map_bytes = setting.effort.map_bytes
    options = ("--memory-bytes", "0", "--path", str(path), "--disk-bytes", str(map_bytes))
    try:
        with store_process(*options) as store:
            task = {"address": store.address, "map_bytes": map_bytes, "seed": round_number}
            task |= {"capacity_bytes": int(map_bytes * FILL)}
            with start("the store's client", command("churn_client", task)) as client:
                client.read()
                for turn in range(1, NUM_TURNS + 1):
                    report = client.ask(num_bytes=map_bytes)
                    line = line_of(turn)
                    samples.add(CHURN, line, HIT_RATE, 100 * report["hit_rate"])
                    samples.add(CHURN, line, ALONE, 100 * report["alone_hit_rate"])
                    samples.add(CHURN, line, PUT_RATE, report["bytes_per_s"] / 1e6)
                    samples.add(CHURN, line, FILE, (path / "data.mdb").stat().st_size / MIB)
                    samples.add(CHURN, line, MAP, map_bytes / MIB)
    finally:
        shutil.rmtree(path)


def line_of(turn: int) -> str:
    return f"turn {turn} of {NUM_TURNS}"


def bars() -> list[Bar]:
    last = line_of(NUM_TURNS)
    return [
        Bar("file after the last turn over the map's bound", (CHURN, last, FILE), (CHURN, last, MAP), most=1.0),
        Bar("blocks found over the policy alone, last turn", (CHURN, last, HIT_RATE), (CHURN, last, ALONE), least=0.95),
    ]
