"""The coordinator alone, between nodes and clients that are made up: how fast, and what it adds: `make
bench-coordinator`.

Everything is loopback between processes. Rows, by the names that --rows takes:

  relay      tokens from nodes to clients, of 1, 100 and 1,000 answers at once, beside gRPC alone
  latency    how long a token takes to the client at a moderate pace, through the coordinator and without it
  requests   short answers one after another
  refusals   how soon a request is refused while the queue is full
  decisions  how long a placement takes among 1,000 nodes, in process

In every round each is measured once, in fresh processes, before the next round begins, so that a drift of the machine
meets all of them. A figure is the median over the rounds, with the least and the greatest. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import replace

from bench.coordinator import decisions, latency, relay, requests
from bench.coordinator.plan import DECISIONS, LATENCY, QUICK, REFUSALS, RELAY, REQUESTS, ROWS, Effort, Setting
from bench.engine import machine
from bench.handoff.samples import Bar
from bench.options import make_parser
from bench.rounds import Part, Results, measure_all
from kvrelay.demo_model import cache_directory, fetch, say_to_stderr

TITLES = {
    RELAY: "Tokens relayed, as fast as it goes",
    LATENCY: "From a node to a client",
    latency.COST: "What that took",
    REQUESTS: "Short answers",
    REFUSALS: "Refusals",
    DECISIONS: "One placement among 1,000 nodes",
}
PARTS: dict[str, Part[Setting]] = {
    RELAY: (RELAY, relay.measure),
    LATENCY: (LATENCY, latency.measure),
    REQUESTS: (REQUESTS, requests.measure),
    REFUSALS: (REFUSALS, requests.measure_refusals),
    DECISIONS: (DECISIONS, decisions.measure),
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
            [PARTS[row] for row in options.rows],
            Setting(effort, options.model or fetch()),
            results,
            num_rounds=effort.num_rounds,
            wait_s=options.wait_s,
            output=output,
            say=say_to_stderr,
        )
    finally:  # also what there is when it is ended early
        about = results.about["machine"]
        print(
            f"The coordinator on {about['cpu']}, {about['cores']} cores, loopback; {effort.num_rounds} rounds.\n\n"
            + results.as_markdown()
        )
        say_to_stderr(f"every sample is in {output}")
    return 0 if results.samples.values else 1


def _bars(rows: tuple[str, ...]) -> list[Bar]:
    bars = {
        RELAY: relay.bars,
        LATENCY: latency.bars,
        REFUSALS: requests.refusal_bars,
        DECISIONS: decisions.bars,
    }
    return [bar for row in rows if row in bars for bar in bars[row]()]


def _options() -> argparse.Namespace:
    model = "whose tokenizer the coordinator has (default: the demo model)"
    return make_parser("coordinator", __doc__, ROWS, Effort().num_rounds, model).parse_args()


if __name__ == "__main__":
    sys.exit(main())
