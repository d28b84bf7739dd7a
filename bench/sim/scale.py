"""A thousand nodes and an hour of requests: what a decision takes, and what the simulation does."""

from __future__ import annotations

from dataclasses import replace

from bench.sim.cluster import Setup, simulate
from bench.sim.load import Arrival, azure
from bench.sim.results import finished, quantile, ttfts_s
from bench.sim.tables import table
from bench.sim.tasks import Options

NODES = ((5, 5), (50, 50), (500, 500))
FULL_REQUESTS = 1_500  # from so many requests a run on, `scale` takes the whole hour


def hour() -> list[Arrival]:
    """Both Azure traces at once."""
    both = [replace(one, tenant=name) for name in ("conv", "code") for one in azure(name, 1_024)]
    return sorted(both, key=lambda arrival: arrival.at)


def report(options: Options) -> str:
    load = hour() if options.num_requests >= FULL_REQUESTS else hour()[: options.num_requests]
    rows = []
    for num_prefill, num_decode in NODES:
        setup = Setup(num_prefill=num_prefill, num_decode=num_decode, times_decisions=True)
        run = simulate(setup, load)
        decisions = run.decisions_s
        rows.append(
            [
                f"{num_prefill} + {num_decode}",
                f"{len(finished(run)):,} of {len(load):,}",
                f"{quantile(ttfts_s(run), 0.95):.2f}",
                f"{1e3 * quantile(decisions, 0.5):.3f} / {1e3 * quantile(decisions, 0.99):.3f}",
                f"{len(decisions) / sum(decisions):,.0f}",
                f"{run.num_events:,}",
                f"{run.num_events / run.processor_s:,.0f}",
                f"{run.processor_s:.0f}",
            ]
        )
    columns = (
        *("prefill + decode nodes", "answered", "TTFT p95, s (virtual)", "decision p50 / p99, ms"),
        *("decisions /s", "events", "events /s", "seconds of the processor"),
    )
    return (
        f"Scale: {load[-1].at / 60:.0f} minutes of both Azure traces in virtual time; decisions (ranking all nodes for "
        f"one request) in seconds of this machine's processor\n\n{table(columns, rows)}"
    )
