"""Short answers one after another, and refusals while the queue is full."""

from __future__ import annotations

from bench.coordinator.plan import REFUSALS, REQUESTS, Setting
from bench.coordinator.processes import ends
from bench.engine.table import percentile
from bench.handoff.samples import Bar, Samples

ANSWERS = {"8 tokens, handed over": (100, 8), "8 tokens, computed on the decode node": (20, 8), "1 token": (100, 1)}
NUM_CLIENTS = 32
SLOW = 1.0  # tokens a second, so that what runs goes on running
MAX_QUEUE = 256
REFUSALS_A_S = 200
REFUSED = f"queue full, {REFUSALS_A_S} requests/s"
NUM_BLOCKS = 64  # of each decode node: a few answers' worth


def measure(setting: Setting, samples: Samples, _: int) -> None:
    """One round of short answers. Raises WorkerFailedError."""
    with ends(setting) as both:
        for line, (prompt_tokens, max_tokens) in ANSWERS.items():
            report = both.client.ask(
                do="ask",
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                num_clients=NUM_CLIENTS,
                seconds=setting.effort.requests_s,
            )
            num, cpu_s = report["num_finished"], report["cpu_s"]["between"]
            samples.add(REQUESTS, line, "requests a CPU second", num / cpu_s)
            samples.add(REQUESTS, line, "ms of CPU a request", 1e3 * cpu_s / num)
            samples.add(REQUESTS, line, "requests/s", num / report["wall_s"])
            samples.add(REQUESTS, line, "p50, ms", 1e3 * percentile(report["times_s"], 50))
            samples.add(REQUESTS, line, "p99, ms", 1e3 * percentile(report["times_s"], 99))


def measure_refusals(setting: Setting, samples: Samples, _: int) -> None:
    """One round. Raises WorkerFailedError."""
    with ends(setting, "--max-queue", str(MAX_QUEUE), num_blocks=NUM_BLOCKS) as both:
        both.set_pace(SLOW)
        ask = {"prompt_tokens": 100, "max_tokens": 400}
        both.client.ask(do="keep", num_requests=2 * MAX_QUEUE, **ask)
        report = both.client.ask(do="knock", num_requests=setting.effort.num_refusals, per_second=REFUSALS_A_S, **ask)
        num, cpu_s = report["num_failed"], report["cpu_s"]["between"]
        samples.add(REFUSALS, REFUSED, "refused", num)
        samples.add(REFUSALS, REFUSED, "ms of CPU each", 1e3 * cpu_s / max(num, 1))
        for percent in (50, 99):
            samples.add(REFUSALS, REFUSED, f"p{percent}, ms", 1e3 * percentile(report["times_s"], percent))
        both.client.ask(do="close")


def refusal_bars() -> list[Bar]:
    return [Bar("time to refuse at p99, ms", (REFUSALS, REFUSED, "p99, ms"), most=50.0)]
