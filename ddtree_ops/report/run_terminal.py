"""A run report on a terminal: checks, the bench table, figures, errors, the verdict. Plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddtree_ops.report.chart import number
from ddtree_ops.report.clean import clean
from ddtree_ops.report.lines import indented, say
from ddtree_ops.report.points import Point, columns_of, in_order, labels_text, points_of, shown
from ddtree_ops.report.progress import duration
from ddtree_ops.report.summary import table_lines
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport
from ddtree_ops.wording import count

__all__ = ["print_run"]

_MARK = {
    Verdict.PASS: ("✓", "+", "green"),
    Verdict.FAIL: ("✗", "x", "bold red"),
    Verdict.INCONCLUSIVE: ("?", "?", "yellow"),
    Verdict.SKIPPED: ("-", "-", "dim"),
}
_BAD = (Verdict.FAIL, Verdict.INCONCLUSIVE)
_COLUMNS = {
    "speedup": "SPEED-UP",
    "output_rate": "TOK/S",
    "ttft_median": "TTFT s",
    "tpot_median": "TPOT s",
    "accept_length": "ACCEPT",
    "gpu_memory": "GPU GB",
    "restart": "RESTART s",
    "failed_requests": "FAILED",
}
_EVIDENCE = 3


def print_run(
    console: Console, report: RunReport, *, verbose: bool = False, kept: Path | str | None = None
) -> None:
    """Every target: its checks, with evidence and the next command where one did not pass, its bench points, figures,
    diagnoses and errors; at last the verdict of all.

    :param verbose: evidence of every check, and every figure with samples, spread and source.
    :param kept: where the report lies, for those who look for the rest of the evidence.
    """
    report = clean(report)
    where = f"in {kept}" if kept else "in the report"
    for target in report.targets:
        _target(console, target, verbose, where, "" if report.complete else " so far")
    if not report.complete:
        say(console, Text("partial: the run was not finished, and more was to come", "yellow"))
    checks = [check for target in report.targets for check in target.checks]
    counts = [(verdict, sum(check.verdict is verdict for check in checks)) for verdict in Verdict]
    found = [f"{many} {verdict.value}" for verdict, many in counts if many] or ["nothing was checked"]
    errors = sum(len(target.errors) for target in report.targets)
    parts = ", ".join((*found, count(errors, "error")) if errors else found)
    line = Text.assemble(
        f"{report.command} {report.id}: ", (report.verdict.value, _MARK[report.verdict][2]), f" ({parts})"
    )
    say(console, line)


def _target(console: Console, target: TargetReport, verbose: bool, where: str, so_far: str) -> None:
    head = Text.assemble((target.target, "bold cyan"), " ", (target.verdict.value, _MARK[target.verdict][2]))
    if target.verdict is Verdict.PASS:
        head.append(so_far)
    say(console, head)
    width = max((len(check.name) for check in target.checks), default=0)
    for check in target.checks if verbose else _shortened(target.checks):
        _check(console, check, width, verbose, where)
    points = points_of(target)
    if points:
        for line in _points(points):
            say(console, line, indent=2)
    figures = in_order(each for each in target.all_figures if verbose or not each.labels.get("mode"))
    if not verbose:
        figures = [each for each in figures if each.name not in ("accept_histogram", "load_phase")]
    if figures:
        rows = [
            [
                " ".join(part for part in (each.name, labels_text(each)) if part),
                shown(each.value),
                each.unit,
                str(each.samples),
                "" if each.spread is None else shown(each.spread),
                each.source,
            ]
            for each in figures
        ]
        looks = [["", "bold", "dim", "dim", "dim", "dim"]] * len(rows)
        for line in table_lines(("FIGURE", "VALUE", "UNIT", "SAMPLES", "SPREAD", "SOURCE"), rows, looks):
            say(console, line, indent=2)
    for item in target.diagnoses:
        headline = str(item.get("headline") or "")
        told = any(headline in check.summary for check in target.checks if check.verdict in _BAD)
        if headline and item.get("verdict") != Verdict.PASS and not told:
            indented(console, f"diagnosis: {headline}", 2, "yellow")
    for error in target.errors:
        indented(console, error, 2, "red")


def _shortened(checks: Sequence[CheckResult]) -> list[CheckResult]:
    """The checks with what was said before left out: a consequence of an earlier failure keeps its line and the next command
    alone, and a piece of evidence is shown once.
    """
    short: list[CheckResult] = []
    failed: list[CheckResult] = []
    seen: set[tuple[str, str]] = set()
    for check in checks:
        if check.verdict is not Verdict.FAIL:
            short.append(check)
            continue
        if any(_follows(check, earlier) for earlier in failed):
            short.append(replace(check, evidence=()))
        else:
            fresh = tuple(each for each in check.evidence if (each.source, each.text) not in seen)
            short.append(replace(check, evidence=fresh))
        seen.update((each.source, each.text) for each in check.evidence)
        failed.append(check)
    return short


def _follows(check: CheckResult, earlier: CheckResult) -> bool:
    """Says the same as an earlier failure: in its words, or (a unit that did not hold) with the same next command."""
    return check.summary in earlier.summary or (
        check.name == "steady" and check.hint != "" and check.hint == earlier.hint
    )


def _check(console: Console, check: CheckResult, width: int, verbose: bool, where: str) -> None:
    utf = (console.encoding or "").lower().replace("-", "").startswith("utf")
    mark, ascii_mark, style = _MARK[check.verdict]
    line = Text.assemble((f"{mark if utf else ascii_mark} ", style), (f"{check.name:<{width}}  ", "bold"))
    line.append(check.summary)
    if check.seconds >= 1:
        line.append(f"  {duration(check.seconds)}", "dim")
    say(console, line, indent=2)
    bad = check.verdict in _BAD
    shown_evidence = check.evidence if verbose else check.evidence[:_EVIDENCE] if bad else ()
    for item in shown_evidence:
        place = f" line {item.line}" if item.line is not None else ""
        lines = item.text.splitlines()
        kept = lines if verbose else lines[:_EVIDENCE]
        indented(console, "\n".join((f"{item.source}{place}:", *(f"  {each}" for each in kept))), 6, "dim")
        if len(kept) < len(lines):
            indented(console, f"  ... {len(lines) - len(kept)} more lines", 6, "dim")
    more = len(check.evidence) - len(shown_evidence)
    if bad and more:
        indented(console, f"{count(more, 'more piece')} of evidence {where}", 6, "dim")
    if check.hint and check.verdict is not Verdict.PASS:
        indented(console, f"next: {check.hint}", 6)


def _points(points: Sequence[Point]) -> list[Text]:
    """The table of bench points, in the columns that fit a terminal."""
    known = columns_of(points)
    columns = [name for name in _COLUMNS if name in known]
    rows = []
    for point in points:
        values = (point.value(name) for name in columns)
        rows.append(
            [point.setup, point.concurrency or "-", *("-" if v is None else number(v) for v in values)]
        )
    looks = [["cyan", "", *("bold" if name == "speedup" else "" for name in columns)]] * len(rows)
    return table_lines(("SETUP", "CONC", *(_COLUMNS[name] for name in columns)), rows, looks)
