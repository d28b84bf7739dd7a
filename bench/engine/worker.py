"""What every worker does: make its engine, measure each case, print one line of JSON. Standard library only.

A worker runs in an engine's own environment, in a fresh process. The driver gives it a Task as its only argument.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Protocol

from bench.engine.case import Case, Sample, Step, Task, decode_sample, prefill_sample, task_from_json

Prompts = list[list[int]]
FIRST_ORDINARY_ID = 3  # the ids below are special in the demo model


class Engine(Protocol):
    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        """Runs the prompts at once, greedily, to `num_tokens` tokens each, past any end-of-sequence.

        Yields after each step how many tokens that step gave to all of them together. Nothing is left over.
        """
        ...

    def facts(self) -> dict[str, int | str]:
        """What the engine can say of itself: `weights_bytes` and `kv_bytes`, and `decoder`, which code computes."""
        ...


def work(make: Callable[[Task], Engine], *distributions: str) -> None:
    """The whole life of a worker; `distributions` are the packages whose versions are told."""
    report = own_stdout()
    task = task_from_json(json.loads(sys.argv[1]))
    if task.cpus:
        os.sched_setaffinity(0, task.cpus)
    engine = make(task)
    draw = random.Random(task.seed)
    _run(engine, _prompts(draw, task, 1, 8), 1)
    ready_s = time.monotonic() - task.spawned_at
    if task.busy:
        say(report, {"ready_s": ready_s})
        say(report, {"tokens_per_s": _keep_busy(engine, task, draw)})
        return
    samples = {case.name: asdict(_measure(engine, task, case, draw)) for case in task.cases}
    say(
        report,
        {
            "samples": samples,
            "ready_s": ready_s,
            "peak_rss_bytes": _peak_rss_bytes(),
            "facts": engine.facts(),
            "versions": {name: version(name) for name in distributions},
        },
    )


def _measure(engine: Engine, task: Task, case: Case, draw: random.Random) -> Sample:
    num_prompt, num_output = case.prompt_tokens(task.num_steps), case.output_tokens(task.num_steps)
    if case.kind == "prefill":
        _run(engine, _prompts(draw, task, 1, num_prompt), 1)  # shapes an engine has not met yet cost it extra
    prompts = _prompts(draw, task, case.batch, num_prompt)
    gc.collect()
    steps = _run(engine, prompts, num_output)
    if case.kind == "prefill":
        return prefill_sample(num_prompt, steps)
    return decode_sample(case.batch, task.num_steps, steps)


def _run(engine: Engine, prompts: Prompts, num_tokens: int) -> list[Step]:
    started = time.perf_counter()
    return [Step(time.perf_counter() - started, given) for given in engine.generate(prompts, num_tokens)]


def _prompts(draw: random.Random, task: Task, count: int, num_tokens: int) -> Prompts:
    ordinary = range(FIRST_ORDINARY_ID, task.vocab_size)
    return [draw.sample(ordinary, num_tokens) for _ in range(count)]


def _keep_busy(engine: Engine, task: Task, draw: random.Random) -> float:
    """Prefills until standard input closes, once at least; gives the tokens a second."""
    started, done = time.perf_counter(), 0
    num_tokens = task.cases[0].num_tokens
    while not done or not select.select([sys.stdin], [], [], 0)[0]:
        _run(engine, _prompts(draw, task, 1, num_tokens), 1)
        done += num_tokens
    return done / (time.perf_counter() - started)


def own_stdout() -> int:
    """A descriptor of standard output for the report alone: what libraries print goes to stderr."""
    report = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return report


def say(report: int, fields: dict[str, object]) -> None:
    """One line of JSON for the driver."""
    os.write(report, json.dumps(fields).encode() + b"\n")


def _peak_rss_bytes() -> int:
    """Of this program alone: getrusage's would count what the process was before exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
