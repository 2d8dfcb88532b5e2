"""A run report as Markdown: the step summary of a CI run. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ddtree_ops.report.clean import clean
from ddtree_ops.report.points import Point, columns_of, in_order, labels_text, points_of, shown
from ddtree_ops.report.typed import commands_in
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import RunReport, TargetReport

__all__ = ["LIMIT", "step_summary"]

LIMIT = 900_000
"""Bytes at which a summary is cut: GitHub refuses one above 1 MiB."""
_MARKS = {
    Verdict.PASS: "✅ pass",
    Verdict.FAIL: "❌ fail",
    Verdict.INCONCLUSIVE: "❔ inconclusive",
    Verdict.SKIPPED: "➖ skipped",
}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$@])")
_BAD = (Verdict.FAIL, Verdict.INCONCLUSIVE)
_WIDEST = 400
_CELL = 200
_ROWS = 200
POINT_COLUMNS = ("speedup", "output_rate", "ttft_median", "tpot_median", "accept_length", "failed_requests")


def _text(text: str, widest: int = _WIDEST) -> str:
    """Text in one line that Markdown shows as it is, within a table too."""
    short = text if len(text) <= widest else f"{text[:widest].rstrip()} ..."
    return _SPECIAL.sub(r"\\\1", " ".join(short.split()))


def _code(text: str) -> str:
    """A command or a name as code, in which no backslash escapes: what is not plain becomes text."""
    return _text(text) if "`" in text or "|" in text or "\n" in text or not text else f"`{text}`"


def _next(hint: str) -> str:
    """What to do next: its commands as code and whole, the rest as text, cut where it is long."""
    parts, at, room = [], 0, _CELL
    for start, command in commands_in(hint):
        between = hint[at:start]
        if len(between) > room:
            break
        parts += [_within(between), _code(command)]
        at = start + len(command)
        room -= len(between) + len(command)
    rest = hint[at:]
    return "".join((*parts, _within(rest, max(room, 0)))).strip()


def _within(text: str, widest: int = _WIDEST) -> str:
    """A piece of a sentence, with a blank at either end where there was one."""
    ends = (" " if text[:1].isspace() else "", " " if text[-1:].isspace() else "")
    return ends[0] if not text.strip() else f"{ends[0]}{_text(text, widest)}{ends[1]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> list[str]:
    """:param numbers: how many columns at the end are flush right."""
    rules = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return [f"| {' | '.join(cells)} |" for cells in (head, rules, *rows)]


def step_summary(report: RunReport) -> str:
    """Verdict, checks that did not pass with the next command, bench points and figures of every target."""
    report = clean(report)
    lines = [
        f"## {_MARKS[report.verdict]}: ddtree-ops {_text(report.command)}",
        "",
        " · ".join(
            part
            for part in (
                _code(report.id),
                f"started {_text(report.started)}",
                f"ended {_text(report.ended)}" if report.ended else "",
                f"ddtree-ops {_text(report.version)}" if report.version else "",
            )
            if part
        ),
    ]
    if not report.complete:
        lines += ["", "**Partial report: the run was not finished, and more was to come.**"]
    lines += ["", *_overview(report)]
    for target in report.targets:
        lines += ["", f"### {_text(target.target)}: {_verdict(report, target)}", *_target(target)]
    text = "\n".join(lines) + "\n"
    data = text.encode("utf-8")
    if len(data) <= LIMIT:
        return text
    cut = data[:LIMIT].decode("utf-8", "ignore").rpartition("\n")[0]
    return f"{cut}\n\n**Cut off here: the whole is in report.json.**\n"


def _verdict(report: RunReport, target: TargetReport) -> str:
    """A pass of a run that did not end is one so far."""
    passed = target.verdict is Verdict.PASS and not report.complete
    return f"{_MARKS[target.verdict]} so far" if passed else _MARKS[target.verdict]


def _overview(report: RunReport) -> list[str]:
    if not report.targets:
        return ["No target: there is nothing to judge by."]
    rows = []
    for target in report.targets:
        counts = [str(sum(check.verdict is verdict for check in target.checks)) for verdict in Verdict]
        rows.append([_text(target.target), _verdict(report, target), *counts, str(len(target.errors))])
    head = ("target", "verdict", *(verdict.value for verdict in Verdict), "errors")
    return _table(head, rows, numbers=len(Verdict) + 1)


def _target(target: TargetReport) -> list[str]:
    lines: list[str] = []
    for error in target.errors:
        lines += ["", f"> **error:** {'<br>'.join(_text(line) for line in error.splitlines())}"]
    for item in target.diagnoses:
        if item.get("headline") and item.get("verdict") != Verdict.PASS:
            lines += ["", f"> **diagnosis:** {_text(str(item['headline']))}"]
    if target.checks:
        bad = [check for check in target.checks if check.verdict in _BAD]
        good = [check for check in target.checks if check.verdict not in _BAD]
        rows = [
            [_MARKS[check.verdict], _text(check.name), _text(check.summary, _CELL), _next(check.hint)]
            for check in bad
        ]
        rows += [
            [_MARKS[check.verdict], _text(check.name), _text(check.summary, _CELL), ""] for check in good
        ]
        lines += ["", *_table(("verdict", "check", "found", "next"), rows)]
    points = points_of(target)
    if points:
        lines += ["", *_points(points)]
    figures = in_order(figure for figure in target.all_figures if not figure.labels.get("mode"))
    figures = [figure for figure in figures if figure.name != "accept_histogram"]
    if figures:
        rows = [
            [
                _text(each.name),
                _text(labels_text(each)),
                shown(each.value),
                _text(each.unit),
                str(each.samples),
            ]
            for each in figures[:_ROWS]
        ]
        lines += ["", "<details><summary>Figures</summary>", ""]
        lines += [*_table(("figure", "of", "value", "unit", "samples"), rows), "", "</details>"]
        if len(figures) > _ROWS:
            lines += ["", f"{len(figures) - _ROWS} more are in report.json."]
    return lines


def _points(points: Sequence[Point]) -> list[str]:
    units = columns_of(points)
    columns = [name for name in POINT_COLUMNS if name in units]
    head = ("setup", "concurrency", *(f"{_text(name)} ({_text(units[name])})" for name in columns))
    rows = [
        [_text(point.setup), _text(point.concurrency), *(shown(point.value(name)) for name in columns)]
        for point in points[:_ROWS]
    ]
    lines = _table(head, rows, numbers=len(columns) + 1)
    return lines if len(points) <= _ROWS else [*lines, "", f"{len(points) - _ROWS} more are in points.csv."]
