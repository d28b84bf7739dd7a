"""What the command lines of benchmarks with rows and rounds have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def chosen_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas between, in the order of `known`."""

    def chosen(text: str) -> tuple[str, ...]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {','.join(known)}")
        return tuple(name for name in known if name in names)

    return chosen


def make_parser(
    name: str,
    description: str | None,
    rows: Sequence[str],
    num_rounds: int,
    model: str = "a GGUF file of a Llama (default: the demo model)",
) -> argparse.ArgumentParser:
    """Of `python -m bench.NAME`, as far as such benchmarks have the same options; `model` is the help of that one."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=chosen_of(rows), default=rows, help=f"of {','.join(rows)} (default: all)")
    parser.add_argument("--repeat", type=_num_rounds, help=f"rounds (default: {num_rounds}; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shows that all runs, measures little")
    parser.add_argument("--wait-s", type=float, default=60.0, help="for quiet CPUs before each part, at most")
    parser.add_argument("--model", type=Path, help=model)
    parser.add_argument("--json", type=Path, help="where every sample goes (default: beside the peers)")
    return parser


def _num_rounds(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of rounds; allowed is at least 1")
    return number
