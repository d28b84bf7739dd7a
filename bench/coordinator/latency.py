"""How long a token takes from a node to a client, through the coordinator and without it, at a moderate pace."""

from __future__ import annotations

from bench.coordinator import relay
from bench.coordinator.plan import LATENCY, Setting
from bench.coordinator.processes import ends
from bench.engine.table import percentile
from bench.handoff.samples import Bar, Samples

LOADS = ((1, 20.0), (100, 20.0), (1_000, 4.0))  # answers, tokens a second of each
COST = "latency cost"


def measure(setting: Setting, samples: Samples, _: int) -> None:
    """One round. Raises WorkerFailedError."""
    with ends(setting) as both:
        for num_streams, tokens_per_s in LOADS:
            load = (num_streams, tokens_per_s, setting.effort.latency_s)
            straight, through = both.stream(*load, straight=True), both.stream(*load)
            line = line_of(num_streams, tokens_per_s)
            for percent in (50, 99):
                before, after = (1e3 * percentile(report["ages_s"], percent) for report in (straight, through))
                samples.add(LATENCY, line, f"p{percent} straight, ms", before)
                samples.add(LATENCY, line, f"p{percent} through, ms", after)
                samples.add(LATENCY, line, added(percent), after - before)
            relay.note(through, COST, line, samples)


def added(percent: int) -> str:
    return f"p{percent} added, ms"


def line_of(num_streams: int, tokens_per_s: float) -> str:
    return f"{num_streams:,} x {tokens_per_s:g} tokens/s"


def bars() -> list[Bar]:
    return [Bar("latency added at p50, 100 streams, ms", (LATENCY, line_of(*LOADS[1]), added(50)), most=2.0)]
