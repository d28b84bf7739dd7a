"""Tables in Markdown: policies side by side, each cell the median of its runs with the least and the greatest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def cell(values: Sequence[float], form: str = ".2f") -> str:
    """Such as `3.10 (2.98 to 3.31)`; one number where all are alike, `none` where there is none."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "none"
    middle, least, most = (format(value, form) for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
