"""The coordinator: how fast it is alone, and its policies side by side: `make bench-coordinator`.

Rows, by the names that --rows takes. The coordinator alone, between nodes and clients that are made up (or `alone` for
all of these):

  relay      tokens from nodes to clients, of 1, 100 and 1,000 answers at once, beside gRPC alone
  latency    how long a token takes to the client at a moderate pace, through the coordinator and without it
  requests   short answers one after another
  refusals   how soon a request is refused while the queue is full
  decisions  how long a placement takes among 1,000 nodes, in process

Policies on real clusters, processes on loopback that serve the demo model (or `real`):

  real-placement     by cost, and by load: hit rate, first token, imbalance, of conversations
  real-reservations  all of max_tokens set aside, and what answers usually take: goodput, preemptions
  real-targets       requests that would be late refused, and let in: goodput, refusals, errors of what was foretold
  real-overload      twice what the cluster can do, three tenants: refusals, shares, who comes back, the queue

The coordinator's own policy code in virtual time, against modelled nodes; nothing of it depends on the machine (or
`sim`; `make bench-sim` has more of them):

  sim-placement, sim-reservations, sim-targets, sim-overload

In every round each of the first two kinds is measured once, in fresh processes, before the next round begins, so that a
drift of the machine meets all of them. A figure is the median over the rounds, with the least and the greatest.
bench/README.md says more.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from bench.coordinator import decisions, latency, relay, requests
from bench.coordinator.plan import (
    DECISIONS,
    GROUPS,
    LATENCY,
    QUICK,
    REAL_OVERLOAD,
    REAL_PLACEMENT,
    REAL_RESERVATIONS,
    REAL_TARGETS,
    REFUSALS,
    RELAY,
    REQUESTS,
    ROWS,
    SIM_OVERLOAD,
    SIM_PLACEMENT,
    SIM_RESERVATIONS,
    SIM_TARGETS,
    Effort,
    Setting,
)
from bench.coordinator.real import overload as real_overload
from bench.coordinator.real import placement as real_placement
from bench.coordinator.real import reservations as real_reservations
from bench.coordinator.real import targets as real_targets
from bench.engine import machine
from bench.handoff.samples import Bar
from bench.options import make_parser
from bench.rounds import Part, Results, measure_all
from bench.sim import overload, placements, reservations, targets
from bench.sim.tasks import Options
from kvrelay.demo_model import cache_directory, fetch, say_to_stderr

TITLES = {
    RELAY: "Tokens relayed, as fast as it goes",
    LATENCY: "From a node to a client",
    latency.COST: "What that took",
    REQUESTS: "Short answers",
    REFUSALS: "Refusals",
    DECISIONS: "One placement among 1,000 nodes",
    REAL_PLACEMENT: real_placement.TITLE,
    REAL_RESERVATIONS: real_reservations.TITLE,
    REAL_TARGETS: real_targets.TITLE,
    REAL_OVERLOAD: real_overload.TITLE,
}
PARTS: dict[str, Part[Setting]] = {
    RELAY: (RELAY, relay.measure),
    LATENCY: (LATENCY, latency.measure),
    REQUESTS: (REQUESTS, requests.measure),
    REFUSALS: (REFUSALS, requests.measure_refusals),
    DECISIONS: (DECISIONS, decisions.measure),
    REAL_PLACEMENT: (REAL_PLACEMENT, real_placement.measure),
    REAL_RESERVATIONS: (REAL_RESERVATIONS, real_reservations.measure),
    REAL_TARGETS: (REAL_TARGETS, real_targets.measure),
    REAL_OVERLOAD: (REAL_OVERLOAD, real_overload.measure),
}
VIRTUAL: dict[str, Callable[[Options], str]] = {
    SIM_PLACEMENT: placements.report,
    SIM_RESERVATIONS: reservations.report,
    SIM_TARGETS: targets.report,
    SIM_OVERLOAD: overload.report,
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # by exception: the workers end too
    output = options.json or cache_directory() / "bench" / "results" / time.strftime("coordinator-%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    results = Results({"machine": machine.describe()}, TITLES)
    effort = QUICK if options.quick else Effort()
    effort = replace(effort, num_rounds=options.repeat or effort.num_rounds)
    results.bars = _bars(options.rows)
    try:
        measure_all(
            [PARTS[row] for row in options.rows if row in PARTS],
            Setting(effort, options.model or fetch()),
            results,
            num_rounds=effort.num_rounds,
            wait_s=options.wait_s,
            output=output,
            say=say_to_stderr,
        )
    finally:  # also what there is when it is ended early
        if results.samples.values:
            _print(results, effort)
            say_to_stderr(f"every sample is in {output}")
    for row in options.rows:
        if row in VIRTUAL:
            say_to_stderr(row)
            print(f"### {VIRTUAL[row](_virtual(row, effort, options.jobs))}", end="\n\n", flush=True)
    return 1 if results.not_run else 0


def _print(results: Results, effort: Effort) -> None:
    about = results.about["machine"]
    where = f"{about['cpu']}, {about['cores']} cores, loopback; {effort.num_rounds} rounds"
    print(f"The coordinator on {where}.\n\n{results.as_markdown()}", end="\n\n", flush=True)


def _virtual(row: str, effort: Effort, jobs: int) -> Options:
    num_requests = effort.sim_overload_requests if row == SIM_OVERLOAD else effort.sim_requests
    return Options(num_requests, effort.sim_slices, jobs)


def _bars(rows: tuple[str, ...]) -> list[Bar]:
    bars = {
        RELAY: relay.bars,
        LATENCY: latency.bars,
        REFUSALS: requests.refusal_bars,
        DECISIONS: decisions.bars,
        REAL_OVERLOAD: real_overload.bars,
    }
    return [bar for row in rows if row in bars for bar in bars[row]()]


def _options() -> argparse.Namespace:
    model = "that real clusters serve, and whose tokenizer the coordinator alone has (default: the demo model)"
    parser = make_parser("coordinator", __doc__, ROWS, Effort().num_rounds, model, GROUPS)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help=f"processes for virtual time (default: {cores})")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
