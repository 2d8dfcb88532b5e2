"""Charts as SVG for a page: text in, text out, no script and no file beside it. Pure.

A chart is drawn about 350 units wide, which is near what it gets on a phone and in a column of a wide window, so that its
letters keep their size. Colours are the page's (classes ``s1`` to ``s8``); shapes of marks, dashes and words tell the same, for
those who see no colours. Every chart has a title and a description for those who see no chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ddtree_ops.report.chart import nice_ceiling, number

__all__ = ["Bar", "Series", "bars", "columns", "lines", "waterfall"]

WIDTH = 350
_COLOURS = 8
_ROW = 24
_LETTER = 6.6
_BOLD = 7.6
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True)
class Bar:
    """One bar.

    :param note: what stands at its end, after the value.
    :param colour: 1 to 8.
    """

    label: str
    value: float
    note: str = ""
    colour: int = 1


@dataclass(frozen=True)
class Series:
    """One line: values at the places of the axis; None where nothing was measured.

    :param style: which colour, mark and dashes: the same for a setup in all charts of a page.
    """

    label: str
    values: Sequence[float | None]
    style: int = 0


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def _svg(height: float, title: str, description: str, parts: Sequence[str]) -> str:
    name = escape(f"{title}. {description}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _gutter(labels: Sequence[str], most: float = 0.36) -> float:
    """Width of the labels on the left."""
    return min(max((len(label) for label in labels), default=0) * _LETTER + 8, WIDTH * most)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def bars(title: str, found: Sequence[Bar], unit: str, *, top: float = 0.0, mark: float | None = None) -> str:
    """Bars from left to right, one a row, each with its label and value in words.

    :param top: right end of the axis; 0: the largest value.
    :param mark: a value to compare with, drawn as a line through all rows.
    """
    words = [f"{number(bar.value)}{unit}{f' {bar.note}' if bar.note else ''}" for bar in found]
    left = _gutter([bar.label for bar in found])
    right = max((len(word) for word in words), default=0) * _BOLD + 10
    room = max(WIDTH - left - right, 60.0)
    scale = room / (top or nice_ceiling(max((bar.value for bar in found), default=0.0)))
    crossed = 0.0 if mark is None else min(mark * scale, room)
    shapes, letters = [], []
    bottom = len(found) * _ROW + 4
    for place, (bar, word) in enumerate(zip(found, words, strict=True)):
        y = place * _ROW + 4
        width = max(min(bar.value * scale, room), 1.0)
        shapes.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 8}" rx="2" class="s{bar.colour}"/>'
        )
        letters.append(_text(left - 6, y + 14, _cut(bar.label, int((left - 6) / _LETTER)), "end"))
        clear = max(width, crossed) if width + len(word) * _BOLD + 10 > crossed else width
        letters.append(_text(left + clear + 6, y + 14, word, kind="value"))
    if mark is not None:
        x = left + crossed
        shapes.append(_line(x, 2, x, bottom, "mark"))
    parts = [*shapes, _line(left, 2, left, bottom, "axis"), *letters]
    said = "; ".join(f"{bar.label} {word}" for bar, word in zip(found, words, strict=True))
    return _svg(bottom + 4, title, said, parts)


def waterfall(title: str, found: Sequence[Bar], unit: str, *, top: float = 0.0) -> str:
    """Bars one after the other: each begins where the one above it ends.

    :param top: right end of the axis; 0: the sum.
    """
    words = [f"{number(bar.value)} {unit}" for bar in found]
    left = _gutter([bar.label for bar in found])
    total = sum(bar.value for bar in found)
    room = WIDTH - left - 8
    scale = room / (top or total or 1.0)
    parts, done = [], 0.0
    bottom = len(found) * _ROW + 4
    for place, (bar, word) in enumerate(zip(found, words, strict=True)):
        y = place * _ROW + 4
        x, width = left + done * scale, max(bar.value * scale, 1.5)
        parts.append(_text(left - 6, y + 14, _cut(bar.label, int((left - 6) / _LETTER)), "end"))
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 8}" rx="2" class="s{bar.colour}"/>'
        )
        after = x + width + 6
        if after + len(word) * _BOLD <= WIDTH:
            parts.append(_text(after, y + 14, word, kind="value"))
        elif x - left > len(word) * _BOLD + 8:
            parts.append(_text(x - 6, y + 14, word, "end", "value"))
        else:
            parts.append(_text(x + width - 6, y + 14, word, "end", "inside"))
        done += bar.value
    parts.append(_line(left, 2, left, bottom, "axis"))
    end, word = left + total * scale, f"{number(total)} {unit} in all"
    parts.append(_text(left, bottom + 15, "0", kind="tick"))
    if end - left > len(word) * _LETTER + 20:
        parts.append(_text(end, bottom + 15, word, "end", "tick"))
    else:
        parts.append(_text(max(end, left + 20), bottom + 15, word, kind="tick"))
    said = "; ".join(f"{bar.label} {word}" for bar, word in zip(found, words, strict=True))
    return _svg(bottom + 22, title, said, parts)


def columns(title: str, found: Sequence[Bar], below: str) -> str:
    """Columns side by side, values above them in per cent; ``below`` names the axis."""
    height, left = 150.0, 8.0
    step = (WIDTH - 2 * left) / max(len(found), 1)
    most = max((bar.value for bar in found), default=0.0) or 1.0
    parts = []
    for place, bar in enumerate(found):
        tall = bar.value / most * (height - 40)
        x, y = left + place * step, height - 18 - tall
        middle = x + step / 2
        wide = min(step * 0.7, 60)
        parts.append(
            f'<rect x="{middle - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{max(tall, 0.5):.1f}"'
            f' rx="2" class="s{bar.colour}"/>'
        )
        if len(found) <= 12:
            parts.append(_text(middle, y - 5, f"{bar.value:.0f}%", "middle", "value"))
        if len(found) <= 16 or place % (len(found) // 8) == 0:
            parts.append(_text(middle, height - 3, bar.label, "middle", "tick"))
    parts.append(_line(left, height - 18, WIDTH - left, height - 18, "axis"))
    parts.append(_text(WIDTH / 2, height + 14, below, "middle", "tick"))
    said = "; ".join(f"{bar.label}: {bar.value:.1f}%" for bar in found)
    return _svg(height + 20, title, said, parts)


def _sign(shape: int, x: float, y: float, kind: str) -> str:
    """One of four shapes of marks, each filled or hollow."""
    look = f'class="{kind}{" hollow" if shape >= 4 else ""}"'
    if shape % 4 == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}/>'
    if shape % 4 == 1:
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {look}/>'
    corners = ((0, -5), (4.5, 3.5), (-4.5, 3.5)) if shape % 4 == 2 else ((0, -5), (5, 0), (0, 5), (-5, 0))
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}" {look}/>'


def lines(title: str, places: Sequence[str], found: Sequence[Series], unit: str, below: str) -> str:
    """Lines over places that are equally far apart, with a legend below; ``below`` names the axis, ``unit`` the other one."""
    known = [value for series in found for value in series.values if value is not None]
    top = nice_ceiling(max(known, default=0.0))
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    left = max(50.0, max(len(number(top * share)) for share in shares) * 7 + 12)
    up, floor = 22.0, 210.0
    step = (WIDTH - left - 30) / max(len(places) - 1, 1)
    at = (
        [left + 12 + place * step for place in range(len(places))]
        if len(places) > 1
        else [(WIDTH + left) / 2]
    )
    parts = [_text(4, 12, unit, kind="tick")]
    for share in shares:
        y = floor - share * (floor - up)
        parts.append(_line(left, y, WIDTH - 6, y, "grid" if share else "axis"))
        parts.append(_text(left - 6, y + 4, number(top * share), "end", "tick"))
    for x, place in zip(at, places, strict=True):
        parts.append(_text(x, floor + 16, place, "middle", "tick"))
    parts.append(_text((WIDTH + left) / 2, floor + 33, below, "middle", "tick"))
    wide = max((len(series.label) for series in found), default=0) * _LETTER + 46
    beside = max(int((WIDTH - 8) // wide), 1)
    for order, series in enumerate(found):
        style = series.style
        colour = style % _COLOURS + 1
        dots = [
            (x, floor - value / top * (floor - up))
            for x, value in zip(at, series.values, strict=True)
            if value is not None
        ]
        dash = _DASHES[style // 2 % len(_DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{way}" class="line c{colour}"{dashed}/>')
        parts += [_sign(style % 8, x, y, f"s{colour}") for x, y in dots]
        x, y = 8 + order % beside * wide, floor + 54 + order // beside * 20
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" class="line c{colour}"{dashed}/>')
        parts.append(_sign(style % 8, x + 13, y, f"s{colour}"))
        parts.append(_text(x + 32, y + 4, _cut(series.label, 52)))
    rows = -(-len(found) // beside)
    said = "; ".join(
        f"{series.label}: "
        + ", ".join(
            f"{place} {'not measured' if value is None else number(value)}"
            for place, value in zip(places, series.values, strict=True)
        )
        for series in found
    )
    return _svg(floor + 48 + rows * 20, title, f"{unit} by {below}. {said}", parts)
