"""What the rounds gave, by table, line and column, and the Markdown made of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.engine.table import NOTHING, markdown, spread

Key = tuple[str, str, str]  # table, line, column


@dataclass(slots=True)
class Samples:
    """Grows from round to round. Lines and columns are shown in the order in which they came."""

    values: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, table: str, line: str, column: str, value: float) -> None:
        self.values.setdefault((table, line, column), []).append(value)

    def median(self, key: Key) -> float | None:
        values = self.values.get(key)
        return statistics.median(values) if values else None

    def as_markdown(self, table: str) -> str:
        """Medians over the rounds, with the least and the greatest. Empty if there is nothing."""
        keys = [key for key in self.values if key[0] == table]
        lines = dict.fromkeys(line for _, line, _ in keys)
        columns = dict.fromkeys(column for *_, column in keys)
        if not keys:
            return ""
        cells = [[line, *(spread(self.values.get((table, line, column), [])) for column in columns)] for line in lines]
        return markdown(["", *columns], cells)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"table": table, "line": line, "column": column, "values": values}
            for (table, line, column), values in self.values.items()
        ]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must be: one median, or one over another. `aim` is what would be better still."""

    what: str
    figure: Key
    over: Key | None = None
    least: float | None = None
    most: float | None = None
    aim: float | None = None

    def measured(self, samples: Samples) -> float | None:
        figure = samples.median(self.figure)
        if figure is None or self.over is None:
            return figure
        base = samples.median(self.over)
        return figure / base if base else None

    def verdict(self, value: float) -> str:
        if (self.least is not None and value < self.least) or (self.most is not None and value > self.most):
            return "missed"
        if self.aim is None:
            return "met"
        reached = value >= self.aim if self.least is not None else value <= self.aim
        return "met, and the aim" if reached else "met, not the aim"

    @property
    def goal(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return bound if self.aim is None else f"{bound} (aim {self.aim:g})"


def bars_as_markdown(bars: list[Bar], samples: Samples) -> str:
    """Those whose figures were measured."""
    rows = []
    for bar in bars:
        value = bar.measured(samples)
        if value is not None:
            rows.append([bar.what, f"{value:.2f}", bar.goal, bar.verdict(value)])
    return markdown(["", "measured", "bar", ""], rows) if rows else NOTHING
