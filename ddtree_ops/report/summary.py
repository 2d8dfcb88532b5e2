"""The end of a command on a terminal: outcome, cause, state left, next command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.deploy.plan import Plan
from ddtree_ops.report.diagnosis import print_diagnosis
from ddtree_ops.report.lines import folded, indented, say
from ddtree_ops.report.progress import duration
from ddtree_ops.results import CheckResult, Verdict

__all__ = [
    "folded",
    "indented",
    "print_answer",
    "print_checks",
    "print_diagnosis",
    "print_plan",
    "print_results",
    "say",
    "table_lines",
]

_STYLE = {
    Outcome.UNCHANGED: "green",
    Outcome.DEPLOYED: "green",
    Outcome.PASSED: "green",
    Outcome.DONE: "green",
    Outcome.ROLLED_BACK: "yellow",
    Outcome.RESTORED: "green",
    Outcome.INTERRUPTED: "yellow",
    Outcome.SKIPPED: "yellow",
    Outcome.FAILED: "bold red",
}
_MARK = {
    Verdict.PASS: ("✓", "green"),
    Verdict.FAIL: ("✗", "bold red"),
    Verdict.INCONCLUSIVE: ("?", "yellow"),
    Verdict.SKIPPED: ("-", "dim"),
}


def print_results(console: Console, results: Sequence[Result]) -> None:
    """What happened on every host, then why, then what to type next."""
    for result in results:
        if result.diagnosis is not None and result.error is not None:
            if result.diagnosis.diagnoses:
                print_diagnosis(console, result.diagnosis, host=result.host)
            elif result.diagnosis.loading:
                say(console, Text(f"{result.host}: {result.diagnosis.loading}"))
            else:
                say(console, Text(f"{result.host}: no known cause stands in {result.diagnosis.searched}"))
    for result in results:
        if result.outcome is Outcome.SKIPPED:
            continue
        line = Text.assemble(
            (f"{result.host} ", "bold cyan"),
            (result.outcome.value, _STYLE[result.outcome]),
            f" in {duration(sum(result.seconds.values()))}",
        )
        if result.plan is not None and result.error is None:
            line.append(f": {result.plan.wish.runtime} {result.plan.wish.release[:12]}")
            line.append(", nothing to change" if result.plan.empty else "")
        if result.confirm_until:
            line.append(f", not confirmed: ddtree-ops confirm {result.host} until {result.confirm_until}")
        say(console, line)
        if result.error is not None:
            indented(console, result.error.render(), 2)
        if result.evidence is not None:
            indented(console, f"evidence: {result.evidence}", 2, "dim")
    _print_skipped(console, results)
    if len(results) > 2:
        counts = Counter(result.outcome.value for result in results)
        parts = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        say(console, Text(f"{len(results)} in all: {parts}", "bold"))


def _print_skipped(console: Console, results: Sequence[Result]) -> None:
    """Those that were not started, once for each reason: there may be many."""
    by_reason: dict[str, list[Result]] = {}
    for result in results:
        if result.outcome is Outcome.SKIPPED and result.error is not None:
            by_reason.setdefault(result.error.message, []).append(result)
    for reason, skipped in by_reason.items():
        names = ", ".join(result.host for result in skipped)
        say(
            console,
            Text.assemble((f"{names} ", "bold cyan"), ("skipped", _STYLE[Outcome.SKIPPED]), f": {reason}"),
        )
        error = skipped[0].error
        if error is not None:
            indented(console, f"state: {error.state}\nnext:  {error.hint}", 2)


def print_checks(console: Console, results: Sequence[CheckResult]) -> None:
    """One line a check, with its figures."""
    width = max((len(result.name) for result in results), default=0)
    for result in results:
        mark, style = _MARK[result.verdict]
        line = Text.assemble(
            (f"{mark} ", style), (f"{result.host:<8} ", "cyan"), (f"{result.name:<{width}}  ", "bold")
        )
        say(console, line.append(result.summary))
        if result.verdict is not Verdict.PASS and result.hint:
            indented(console, f"next: {result.hint}", 4)


def print_answer(console: Console, host: str, text: str, *, lines: int = 4) -> None:
    """The beginning of what the model said, for eyes to judge what no check can."""
    shown = text.strip().splitlines()
    say(console, Text.assemble((f"{host} ", "cyan"), "answered:"))
    for line in shown[:lines]:
        say(console, Text(line, "dim"), indent=4)
    if len(shown) > lines:
        say(console, Text(f"... {len(shown) - lines} more lines", "dim"), indent=4)


def print_plan(console: Console, plan: Plan, *, files: bool = False) -> None:
    """The plan as a diff a person can read.

    :param files: name the runtime files that differ.
    """
    head = Text.assemble((f"{plan.wish.host} ", "bold cyan"), f"{plan.wish.unit}  {plan.wish.runtime} ")
    head.append(plan.wish.release[:12] + (f" with {plan.wish.overlay}" if plan.wish.overlay else ""))
    say(console, head)
    if plan.empty:
        console.print(Text("  nothing to change", "green"))
    for change in plan.changes:
        indented(console, f"~ {change.summary}", 2)
        for line in change.diff:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            console.print(Text(f"      {line}", style), soft_wrap=True)
    if plan.empty:
        _stays(console, plan)
        return
    _differing_files(console, plan, names=files)
    for title, changes in (("arguments", plan.arguments), ("environment", plan.variables)):
        if changes is None:
            indented(
                console, f"{title}: the installed unit cannot be read back word by word: see the diff", 2
            )
        elif changes:
            indented(console, f"{title}:", 2)
            for item in changes:
                indented(console, str(item), 4)
    _stays(console, plan)


def _stays(console: Console, plan: Plan) -> None:
    for line in plan.notes:
        indented(console, f"! {line}", 2, "yellow")
    for line in plan.stays:
        indented(console, f"= {line}", 2, "dim")


def _differing_files(console: Console, plan: Plan, *, names: bool) -> None:
    delta = plan.files
    if plan.files_unknown:
        indented(console, f"runtime files: {plan.files_unknown}", 2)
    if delta is None or not (delta.added or delta.changed or delta.removed):
        return
    more = "" if names else "  (--files names them)"
    indented(console, f"runtime files: {delta} against {delta.against[:12]}{more}", 2)
    for mark, style, found in (
        ("+", "green", delta.added),
        ("~", "", delta.changed),
        ("-", "red", delta.removed),
    ):
        for path in found if names else ():
            indented(console, f"{mark} {path}", 4, style)


def table_lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[Sequence[str]]
) -> list[Text]:
    """A table, its head first: columns as wide as what stands in them, but the last; ``styles`` of each cell of ``rows``."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths[-1] = 0
    lines = [Text(" ".join(f"{name:<{width}}" for name, width in zip(head, widths, strict=True)), "dim")]
    for cells, looks in zip(rows, styles, strict=True):
        line = Text()
        for value, width, look in zip(cells, widths, looks, strict=True):
            line.append(f"{value:<{width}} ", look)
        line.rstrip()
        lines.append(line)
    return lines
