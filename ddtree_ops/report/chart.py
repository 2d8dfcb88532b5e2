"""A series of figures as lines of text: a small bar chart with its axes. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "draw", "nice_ceiling", "number"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN = " ..::||##"
_FEWEST = 8
_LABEL = 7


@dataclass(frozen=True)
class Curve:
    """What is drawn.

    :param points: ``(seconds, value)`` in the order of the seconds, which count from anywhere; values are not negative.
    :param begin: what stands under the left end of the time axis, ``end`` under the right one.
    """

    points: Sequence[tuple[float, float]]
    begin: str = ""
    end: str = ""


def nice_ceiling(value: float) -> float:
    """The next of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10 times a power of ten that is not below ``value``; 1 for nothing above 0."""
    if not value > sys.float_info.min or math.isinf(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if value <= step * power * (1 + 1e-9)),
        10 * power,
    )


def number(value: float) -> str:
    """A figure for people: three significant digits, ``1.2k`` and ``3.4M`` for large ones."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def _columns(points: Sequence[tuple[float, float]], columns: int) -> list[float | None]:
    """Means by column of time; a single empty column between two others is one that no sample happened to hit."""
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns
    sums, counts = [0.0] * columns, [0] * columns
    for place, (moment, value) in enumerate(points):
        column = int((moment - first) / width) if width > 0 else place * columns // len(points)
        column = min(max(column, 0), columns - 1)
        sums[column] += value
        counts[column] += 1
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    for place in range(1, columns - 1):
        before, after = means[place - 1], means[place + 1]
        if means[place] is None and counts[place - 1] and before is not None and after is not None:
            means[place] = (before + after) / 2
    return means


def draw(curve: Curve, *, width: int = 72, height: int = 4, plain: bool = False) -> list[str]:
    """The chart, without a title: ``height`` lines of bars and two of the time axis, none longer than ``width`` cells.

    The value axis begins at 0. Time in which nothing was measured stays empty. Without points: no line.

    :param plain: ASCII only.
    """
    points = [
        (moment, value)
        for moment, value in curve.points
        if math.isfinite(moment) and math.isfinite(value) and value >= 0
    ]
    if not points:
        return []
    room = max(width - _LABEL - 2, _FEWEST)
    columns = min(room, max(len(points), len(curve.begin) + len(curve.end) + 2, _FEWEST))
    moments = len({moment for moment, _ in points})
    levels = _columns(points, min(columns, moments if moments > 1 else len(points)))
    stretch = min(-(-columns // len(levels)), max(room // len(levels), 1))
    means = [level for level in levels for _ in range(stretch)]
    top = nice_ceiling(max(value for value in means if value is not None))
    marks = _PLAIN if plain else _BLOCKS
    steps = len(marks) - 1
    heights = [
        0 if value is None else max(1, round(value / top * height * steps)) if value > 0 else 0
        for value in means
    ]
    tick, wall, corner, floor = ("+", "|", "+", "-") if plain else ("┤", "│", "└", "─")
    lines = []
    for row in range(height - 1, -1, -1):
        label = number(top) if row == height - 1 else ""
        bars = "".join(marks[min(max(level - row * steps, 0), steps)] for level in heights)
        lines.append(f"{label:>{_LABEL}} {tick if label else wall}{bars}".rstrip())
    lines.append(f"{'0':>{_LABEL}} {corner}{floor * len(means)}")
    under = curve.begin
    if curve.end and len(under) + len(curve.end) + 2 <= len(means):
        under += curve.end.rjust(len(means) - len(under))
    elif curve.end:
        under = f"{curve.begin} to {curve.end}"
    if under:
        lines.append(" " * (_LABEL + 2) + under)
    return lines
