"""Bench points as CSV: one row a point, one column a figure. Pure."""

from __future__ import annotations

import csv
import io

from ddtree_ops.report.clean import clean
from ddtree_ops.report.points import columns_of, points_of
from ddtree_ops.runreport import RunReport

__all__ = ["points_csv"]

_HEAD = ("run", "target", "mode", "budget", "topk", "concurrency")


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def points_csv(report: RunReport) -> str:
    """The points of every target with units in the head (``ttft_median (s)``); empty where there are none.

    What was not measured is an empty cell.
    """
    report = clean(report)
    rows = [(target.target, point) for target in report.targets for point in points_of(target)]
    if not rows:
        return ""
    columns = columns_of(point for _, point in rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_HEAD, *(_cell(f"{name} ({unit})") for name, unit in columns.items())])
    for target, point in rows:
        words = (report.id, target, point.mode, point.budget, point.topk, point.concurrency)
        values = (point.value(name) for name in columns)
        writer.writerow([*map(_cell, words), *("" if value is None else repr(value) for value in values)])
    return text.getvalue()
