"""What the command lines of benchmarks with rows and rounds have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Groups = Mapping[str, Sequence[str]]  # names that stand for several


def chosen_of(known: Sequence[str], groups: Groups | None = None) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas between, of rows or groups of them, in the order of `known`."""
    meant = {name: (name,) for name in known} | {name: tuple(rows) for name, rows in (groups or {}).items()}

    def chosen(text: str) -> tuple[str, ...]:
        names = text.split(",")
        unknown = [name for name in names if name not in meant]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {','.join(meant)}")
        rows = {row for name in names for row in meant[name]}
        return tuple(name for name in known if name in rows)

    return chosen


def make_parser(
    name: str,
    description: str | None,
    rows: Sequence[str],
    num_rounds: int,
    model: str = "a GGUF file of a Llama (default: the demo model)",
    groups: Groups | None = None,
) -> argparse.ArgumentParser:
    """Of `python -m bench.NAME`, as far as such benchmarks have the same options; `model` is the help of that one."""
    names = ",".join((*rows, *(groups or {})))
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=chosen_of(rows, groups), default=rows, help=f"of {names} (default: all)")
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
