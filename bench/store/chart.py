"""A line chart as SVG, by hand: one picture is not worth a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 130, 44, 40
COLOURS = ("#7f7f7f", "#bcbd22", "#17becf", "#9467bd", "#1f77b4", "#d62728", "#2ca02c", "#8c564b")
NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # x above 0


@dataclass(frozen=True, slots=True)
class _Scale:
    """Logarithmic in x, linear from 0 in y."""

    first_x: float
    last_x: float
    last_y: float

    def x(self, value: float) -> float:
        part = math.log(value / self.first_x) / math.log(self.last_x / self.first_x)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.last_y * (HEIGHT - TOP - BOTTOM)


def line_chart(title: str, lines: Sequence[Line], *, emphasis: str, ceiling: tuple[str, float]) -> str:
    """`emphasis` names the line that is drawn thick; `ceiling` is a dashed line with its name. At least two x."""
    xs = sorted({x for line in lines for x, _ in line.points})
    scale = _Scale(xs[0], xs[-1], _round_up(max(ceiling[1], *(y for line in lines for _, y in line.points))))
    labels = _spread([(scale.y(line.points[-1][1]), line.name) for line in lines])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *_axes(scale, xs),
        *_ceiling(scale, ceiling),
        *(
            part
            for number, line in enumerate(lines)
            for part in _drawn(scale, line, COLOURS[number % len(COLOURS)], line.name == emphasis, labels[line.name])
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _round_up(value: float) -> float:
    """So that the ticks are whole numbers."""
    return math.ceil(value / NUM_TICKS) * NUM_TICKS


def _axes(scale: _Scale, xs: Sequence[float]) -> list[str]:
    parts = []
    for tick in range(NUM_TICKS + 1):
        value = scale.last_y * tick / NUM_TICKS
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.extend(
        f'<text x="{scale.x(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:,.0f}</text>' for x in xs
    )
    return parts


def _ceiling(scale: _Scale, ceiling: tuple[str, float]) -> list[str]:
    name, value = ceiling
    y = scale.y(value)
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-dasharray="4 4"/>',
        f'<text x="{LEFT + 4}" y="{y - 5:.1f}">{escape(name)}</text>',
    ]


def _drawn(scale: _Scale, line: Line, colour: str, thick: bool, label_y: float) -> list[str]:
    points = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in line.points)
    weight = ' font-weight="bold"' if thick else ""
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{3.5 if thick else 1.5}"/>',
        f'<text x="{WIDTH - RIGHT + 8}" y="{label_y + 4:.1f}" fill="{colour}"{weight}>{escape(line.name)}</text>',
    ]


def _spread(labels: Sequence[tuple[float, str]], gap: float = 14.0) -> dict[str, float]:
    """Labels in their order from top to bottom, none upon another, none below the chart."""
    placed: dict[str, float] = {}
    above = -math.inf
    for y, name in sorted(labels):
        above = max(y, above + gap)
        placed[name] = above
    too_low = max(0.0, above - (HEIGHT - BOTTOM))
    return {name: y - too_low for name, y in placed.items()}
