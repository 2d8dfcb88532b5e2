"""Figures laid out for tables: bench points as rows, everything else by name. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddtree_ops.figurenames import FIGURES
from ddtree_ops.results import Figure
from ddtree_ops.runreport import TargetReport

__all__ = [
    "POINT_LABELS",
    "Point",
    "column_of",
    "columns_of",
    "in_order",
    "labels_text",
    "points_of",
    "setup_of",
    "shown",
]

POINT_LABELS = ("mode", "budget", "topk", "concurrency")
"""Labels that tell bench points apart."""
_MODES = {"": 0, "baseline": 1, "dflash": 2, "ddtree": 3}
_NAMES = {name: place for place, name in enumerate(FIGURES)}


@dataclass(frozen=True)
class Point:
    """One bench point: one setup of the server under one load.

    :param concurrency: empty for a setup of which only the load is known.
    :param figures: by column, as :func:`column_of` calls it; those of the setup (memory, restart) are in each of its points.
    """

    mode: str
    budget: str = ""
    topk: str = ""
    concurrency: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def setup(self) -> str:
        """What the server ran with, in words: ``ddtree 32/8`` (budget, top-k), ``dflash``, ``baseline``."""
        return setup_of({"mode": self.mode, "budget": self.budget, "topk": self.topk})

    def value(self, column: str) -> float | None:
        """The value of a column; None where it was not measured."""
        found = self.figures.get(column)
        return None if found is None else found.value


def setup_of(labels: Mapping[str, str]) -> str:
    """Mode, budget and top-k of labels in words; empty where they name no mode."""
    sizes = "/".join(labels[name] for name in ("budget", "topk") if labels.get(name))
    return " ".join(part for part in (labels.get("mode", ""), sizes) if part)


def labels_text(figure: Figure) -> str:
    """Its labels as ``mode=ddtree budget=32``, those of a bench point first."""
    first = [name for name in POINT_LABELS if name in figure.labels]
    rest = sorted(name for name in figure.labels if name not in POINT_LABELS)
    return " ".join(f"{name}={figure.labels[name]}" for name in (*first, *rest))


def column_of(figure: Figure) -> str:
    """Its name, and the values of labels that are not the point's: ``ttft_median``, ``load_phase_weights``."""
    rest = sorted(set(figure.labels) - set(POINT_LABELS))
    return "_".join((figure.name, *(figure.labels[name] for name in rest)))


def _size(text: str) -> tuple[int, float, str]:
    try:
        value = float(text)
    except ValueError:
        return (0 if not text else 2), 0.0, text
    return (1, value, text) if math.isfinite(value) else (2, 0.0, text)


def _place(labels: Mapping[str, str]) -> tuple[object, ...]:
    mode = labels.get("mode", "")
    return (
        (_MODES.get(mode, len(_MODES)), mode),
        *(_size(labels.get(name, "")) for name in POINT_LABELS[1:]),
    )


def in_order(figures: Iterable[Figure]) -> list[Figure]:
    """By name in the order of the table of figures, then by point; load phases and the like stay as they came."""
    return sorted(
        figures, key=lambda each: (_NAMES.get(each.name, len(_NAMES)), each.name, _place(each.labels))
    )


def points_of(target: TargetReport) -> list[Point]:
    """Every bench point of a target: baseline, DFLASH, DDTREE, each by budget, top-k and concurrency."""
    setups: dict[tuple[str, ...], dict[str, dict[str, Figure]]] = {}
    for figure in target.all_figures:
        if not figure.labels.get("mode"):
            continue
        key = tuple(figure.labels.get(name, "") for name in POINT_LABELS[:3])
        loads = setups.setdefault(key, {})
        loads.setdefault(figure.labels.get("concurrency", ""), {})[column_of(figure)] = figure
    points = [
        Point(key[0], key[1], key[2], load, {**loads.get("", {}), **figures})
        for key, loads in setups.items()
        for load, figures in loads.items()
        if load or len(loads) == 1
    ]
    return sorted(points, key=lambda each: _place({name: getattr(each, name) for name in POINT_LABELS}))


def columns_of(points: Iterable[Point]) -> dict[str, str]:
    """Columns of these points with their units, in the order of the table of figures."""
    found: dict[str, Figure] = {}
    for point in points:
        for column, figure in point.figures.items():
            found.setdefault(column, figure)
    ordered = sorted(found.items(), key=lambda each: _NAMES.get(each[1].name, len(_NAMES)))
    return {column: figure.unit for column, figure in ordered}


def shown(value: float | None) -> str:
    """A value for a table: whole numbers whole, others with four significant digits; ``-`` for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
