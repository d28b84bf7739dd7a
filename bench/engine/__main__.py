"""Speed of kvrelay's engine on this machine's CPUs beside its peers', one engine at a time: `make bench-engine`.

The peers live in virtual environments of their own, which `make bench-peers` makes; those that are not there are left
out and named. All run the same weights, those of the demo model's file (bench/engine/models.py), and the same cases
(bench/engine/case.py says how each figure is defined). In every round each engine runs once in a fresh process, after
the others, so that a drift of the machine meets all of them. Tables go to standard output, every sample to the JSON
file. A figure is the median over the rounds, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.engine import machine
from bench.engine.engines import KVRELAY, PEERS, Engine, find_engines
from bench.engine.launch import WorkerFailedError, busy_worker, run_worker
from bench.engine.models import derive
from bench.engine.plan import BUSY_CASE, QUICK, TABLES, Effort, Run, Setting, make_plan
from bench.engine.results import Outcome, Results
from bench.options import chosen_of
from kvrelay.demo_model import cache_directory, fetch, say_to_stderr
from kvrelay.gguf_metadata import read_header
from kvrelay.kv.layout import ITEM_BYTES

NUM_ROUNDS = 5


def main() -> int:
    options = _options()
    # An exit by exception ends the worker too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    directory = cache_directory() / "bench"
    source = options.model or fetch()
    results = Results({"machine": machine.describe(), "model": source.name, "threads": options.threads})
    engines = find_engines(directory, source, derive(source, directory / "models"), options.threads)
    chosen = _present([engines[name] for name in options.engines], results)
    effort = QUICK if options.quick else Effort()
    plan = make_plan(
        options.rows, chosen, Setting(effort, options.threads, options.dtype, options.decoder, _two_cpus())
    )
    output = options.json or directory / "results" / time.strftime("engine-%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    num_rounds = options.repeat or (1 if options.quick else NUM_ROUNDS)
    try:
        _measure_all(plan, num_rounds, source, options.wait_s, results, output)
    finally:  # also what there is when it is ended early
        cpu, cores = results.about["machine"]["cpu"], results.about["machine"]["cores"]
        print(f"{source.name} on {cpu}, {cores} cores; {options.threads} threads; {num_rounds} rounds\n")
        print(results.as_markdown())
        say_to_stderr(f"every sample is in {output}")
    return 0 if results.outcomes else 1


def _measure_all(
    plan: Sequence[Run], num_rounds: int, source: Path, wait_s: float, results: Results, output: Path
) -> None:
    """Writes what there is after each run, so that little is lost when it is ended early."""
    vocab_size = read_header(source).tensors["token_embd.weight"].shape[-1]
    for round_number in range(1, num_rounds + 1):
        for run in plan:
            if run.name in results.not_run:  # it failed once
                continue
            busy = machine.wait_until_quiet(say_to_stderr, wait_s)
            _measure(run, round_number, vocab_size, busy, results)
            output.write_text(json.dumps(results.as_json(), indent=1))


def _measure(run: Run, round_number: int, vocab_size: int, busy: float, results: Results) -> None:
    say_to_stderr(f"round {round_number}: {run.name}")
    task = run.task(vocab_size, seed=round_number)
    try:
        if run.beside_prefill:
            other = replace(task, cases=(BUSY_CASE,), cpus=_two_cpus()[1:])
            with busy_worker(run.engine, other) as tokens_per_s:
                report = run_worker(run.engine, task)
            results.outcomes.append(Outcome(run, round_number, report, busy, tokens_per_s[0]))
        else:
            results.outcomes.append(Outcome(run, round_number, run_worker(run.engine, task), busy))
    except WorkerFailedError as error:
        say_to_stderr(str(error))
        results.not_run[run.name] = str(error).splitlines()[-1]


def _present(engines: Sequence[Engine], results: Results) -> dict[str, Engine]:
    for engine in engines:
        if engine.missing:
            say_to_stderr(f"{engine.label} is left out: {engine.missing}")
            results.not_run[engine.label] = engine.missing
    return {engine.name: engine for engine in engines if not engine.missing}


def _two_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))[:2])


def _options() -> argparse.Namespace:
    names, num_cpus = (*PEERS, KVRELAY), len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--engines", type=chosen_of(names), default=names, help=f"of {','.join(names)} (default: all)")
    parser.add_argument("--rows", type=chosen_of(TABLES), default=TABLES, help=f"of {','.join(TABLES)} (default: all)")
    rounds = f"rounds, a fresh process of each engine in each (default: {NUM_ROUNDS}; 1 with --quick)"
    parser.add_argument("--repeat", type=int, help=rounds)
    parser.add_argument(
        "--quick", action="store_true", help="few cases and steps: shows that all runs, measures little"
    )
    parser.add_argument("--threads", type=int, default=num_cpus, help="of every engine (default: all cores)")
    parser.add_argument("--wait-s", type=float, default=60.0, help="for quiet CPUs before each process, at most")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16", help="kvrelay's; peers run bfloat16")
    parser.add_argument("--decoder", choices=("auto", "native", "torch"), default="auto", help="kvrelay's")
    parser.add_argument("--model", type=Path, help="a GGUF file of a Llama (default: the demo model)")
    parser.add_argument("--json", type=Path, help="where every sample goes (default: beside the peers)")
    options = parser.parse_args()
    if options.threads < 1 or (options.repeat is not None and options.repeat < 1):
        parser.error("--repeat and --threads are at least 1")
    if "contention" in options.rows and num_cpus < 2:
        parser.error("contention is measured on two cores and there is one; leave it out of --rows")
    return options


if __name__ == "__main__":
    sys.exit(main())
