"""Policies side by side in virtual time: python -m bench.sim

Everything printed, but for the times of `scale`, is the same on every machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from bench.sim import closed_loop, overload, placements, reservations, scale, tails, targets
from bench.sim.tasks import Options

ROWS: dict[str, Callable[[Options], str]] = {
    "reservations": reservations.report,
    "placement": placements.report,
    "targets": targets.report,
    "tails": tails.report,
    "overload": overload.report,
    "forecasts": closed_loop.report,
    "scale": scale.report,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        raise SystemExit(f"--rows has {', '.join(sorted(unknown))}; allowed are {', '.join(ROWS)}")
    num_requests = options.requests or (300 if options.quick else 1_500)
    num_slices = options.slices or (1 if options.quick else 3)
    for name in options.rows:
        print(ROWS[name](Options(num_requests, num_slices, options.jobs)), end="\n\n", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="short runs, one of each: does everything run?")
    parser.add_argument("--requests", type=int, help="of each run (1,500)")
    parser.add_argument("--slices", type=int, help="of a trace: runs of each row (3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
