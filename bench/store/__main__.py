"""The KV store: how fast it gives and takes, what that is worth to a request, and what it costs: `make bench-store`.

Everything is on this machine, between processes. Rows, by the names that --rows takes:

  ttft      first token of a prompt whose prefix is in the store's memory or on its disk, against computing it
  rates     GB/s of Get and Put, beside raw LMDB, a file a block, Redis and the bare KV stream
  requests  first tokens while blocks are put, and with a store that is stopped, stuck, slow or lying, against no store
  churn     five times the map's size through LMDB: the file's size, and the hit rate
  replay    hit rates of the store's policy and of others on public traces; moves no bytes, is the last, and runs once

In every round each is measured once, in fresh processes, before the next round begins, so that a drift of the machine
meets all of them. A figure is the median over the rounds, with the least and the greatest. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.engine import machine
from bench.engine.launch import ROOT
from bench.handoff.samples import Bar
from bench.handoff.shapes import LAYOUTS, column_of
from bench.options import make_parser
from bench.rounds import Part, Results, measure_all
from bench.store import churn, rates, requests, ttft
from bench.store.plan import CHURN, QUICK, RATES, REPLAY, REQUESTS, ROWS, TTFT, Effort, Setting
from kvrelay.demo_model import cache_directory, fetch, say_to_stderr

TITLES = {
    TTFT: "First token, s, by the length of the prefix",
    ttft.LOADED: "Tokens of it that came from the store",
    ttft.BREAK_EVEN: "Break-even",
    **{rates.table_of(shape): f"GB/s, {column_of(shape)}" for shape in LAYOUTS},
    rates.EIGHT_B: "A prefix of an 8B model (2 MiB a block; data only)",
    requests.OFFLOAD: "First token while blocks are put",
    requests.FAULTS: "First token, s, of a prompt whose prefix is in a store that has a fault",
    CHURN: "Five times the map's size",
}
PARTS: dict[str, Part[Setting]] = {
    TTFT: (TTFT, ttft.measure),
    RATES: (RATES, rates.measure),
    REQUESTS: (REQUESTS, requests.measure),
    CHURN: (CHURN, churn.measure),
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # by exception: the processes end too
    directory = cache_directory() / "bench"
    output = options.json or directory / "results" / time.strftime("store-%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    results = Results({"machine": machine.describe()}, TITLES)
    effort = QUICK if options.quick else Effort()
    effort = replace(effort, num_rounds=options.repeat or effort.num_rounds)
    redis = shutil.which("redis-server")
    if RATES in options.rows and redis is None:
        results.not_run[rates.REDIS] = "there is no redis-server; `apt install redis-server` brings it"
    setting = Setting(effort, options.model or fetch(), directory, Path(redis) if redis else None)
    results.bars = _bars(options.rows, effort)
    try:
        measure_all(
            *([PARTS[row] for row in options.rows if row in PARTS], setting, results),
            num_rounds=effort.num_rounds,
            wait_s=options.wait_s,
            output=output,
            say=say_to_stderr,
        )
    finally:  # also what there is when it is ended early
        print(_heading(setting, results) + "\n\n" + results.as_markdown())
        say_to_stderr(f"every sample is in {output}")
    if REPLAY in options.rows:
        _replay(options.quick)
    return 0 if results.samples.values or options.rows == (REPLAY,) else 1


def _replay(quick: bool) -> None:
    subprocess.run([sys.executable, "-m", "bench.store.replay", *(["--quick"] if quick else [])], cwd=ROOT, check=True)


def _bars(rows: tuple[str, ...], effort: Effort) -> list[Bar]:
    bars = {TTFT: ttft.bars(effort), RATES: rates.bars(), REQUESTS: requests.bars(), CHURN: churn.bars()}
    return [bar for row in rows for bar in bars.get(row, [])]


def _heading(setting: Setting, results: Results) -> str:
    about = results.about["machine"]
    return (
        f"The KV store on {about['cpu']}, {about['cores']} cores, loopback; {setting.effort.num_rounds} rounds; "
        f"what is computed: {setting.model.name} in bfloat16, by a prefill and a decode node of one thread each."
    )


def _options() -> argparse.Namespace:
    parser = make_parser("store", __doc__, ROWS, Effort().num_rounds)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("processes are measured beside each other, and there is one core")
    return options


if __name__ == "__main__":
    sys.exit(main())
