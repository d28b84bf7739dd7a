"""Medians, ratios and Markdown. Plain data in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """An engine's samples, tokens a second, by column."""

    label: str
    samples: dict[str, list[float]]

    def median(self, column: str) -> float | None:
        values = self.samples.get(column)
        return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> str:
    """`median (min-max)`; the median alone when there is one value."""
    if not values:
        return NOTHING
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))}-{number(max(values))})"


def number(value: float) -> str:
    """Three digits at least, and no more behind the point than that takes."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def speeds(rows: Sequence[Row], columns: Sequence[str]) -> str:
    cells = [[row.label, *(spread(row.samples.get(column, [])) for column in columns)] for row in rows]
    return markdown(["tokens/s", *columns], cells)


def ratios(ours: Row, peers: Sequence[Row], columns: Sequence[str]) -> str:
    """Our median over each peer's, and over the best peer's of each column."""
    best = Row("the best peer", {column: _best(peers, column) for column in columns})
    rows = [*peers, best] if len(peers) > 1 else list(peers)
    cells = [[f"over {row.label}", *(_ratio(ours, row, column) for column in columns)] for row in rows]
    return markdown([f"{ours.label} ...", *columns], cells)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    alignment = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, alignment, *rows))


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank: the least value that `percent` of all do not exceed. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values have no percentile")
    rank = -(-percent * len(values) // 100)
    return sorted(values)[max(rank, 1) - 1]


def _best(peers: Sequence[Row], column: str) -> list[float]:
    medians = [median for peer in peers if (median := peer.median(column)) is not None]
    return [max(medians)] if medians else []


def _ratio(ours: Row, theirs: Row, column: str) -> str:
    own, other = ours.median(column), theirs.median(column)
    return NOTHING if own is None or not other else f"{own / other:.2f}"
