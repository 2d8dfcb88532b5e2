"""The end of a command on a terminal: outcome, cause, state left, next command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ddtree_ops.deploy.deployment import Outcome, Result
from ddtree_ops.deploy.plan import Plan
from ddtree_ops.report.progress import duration
from ddtree_ops.report.typed import typed
from ddtree_ops.results import CheckResult, Verdict

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = ["print_answer", "print_checks", "print_diagnosis", "print_plan", "print_results"]

_STYLE = {
    Outcome.UNCHANGED: "green",
    Outcome.DEPLOYED: "green",
    Outcome.PASSED: "green",
    Outcome.ROLLED_BACK: "yellow",
    Outcome.INTERRUPTED: "yellow",
    Outcome.FAILED: "bold red",
}
_SEVERITY = {"fatal": "bold red", "degraded": "bold yellow"}
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
            else:
                _say(console, Text(f"{result.host}: no known cause stands in {result.diagnosis.searched}"))
    for result in results:
        line = Text.assemble(
            (f"{result.host} ", "bold cyan"),
            (result.outcome.value, _STYLE[result.outcome]),
            f" in {duration(sum(result.seconds.values()))}",
        )
        if result.plan is not None and result.error is None:
            line.append(f": {result.plan.wish.runtime} {result.plan.wish.release[:12]}")
            line.append(", nothing to change" if result.plan.empty else "")
        _say(console, line)
        if result.error is not None:
            _indented(console, result.error.render(), 2)
        if result.evidence is not None:
            _indented(console, f"evidence: {result.evidence}", 2, "dim")


def print_checks(console: Console, results: Sequence[CheckResult]) -> None:
    """One line a check, with its figures."""
    width = max((len(result.name) for result in results), default=0)
    for result in results:
        mark, style = _MARK[result.verdict]
        line = Text.assemble(
            (f"{mark} ", style), (f"{result.host:<8} ", "cyan"), (f"{result.name:<{width}}  ", "bold")
        )
        _say(console, line.append(result.summary))
        if result.verdict is not Verdict.PASS and result.hint:
            _indented(console, f"next: {result.hint}", 4)


def print_answer(console: Console, host: str, text: str, *, lines: int = 4) -> None:
    """The beginning of what the model said, for eyes to judge what no check can."""
    shown = text.strip().splitlines()
    _say(console, Text.assemble((f"{host} ", "cyan"), "answered:"))
    for line in shown[:lines]:
        _say(console, Text(line, "dim"), indent=4)
    if len(shown) > lines:
        _say(console, Text(f"... {len(shown) - lines} more lines", "dim"), indent=4)


def print_plan(console: Console, plan: Plan) -> None:
    """The plan as a diff a person can read."""
    head = Text.assemble((f"{plan.wish.host} ", "bold cyan"), f"{plan.wish.unit}  {plan.wish.runtime} ")
    head.append(plan.wish.release[:12])
    _say(console, head)
    if plan.empty:
        console.print(Text("  nothing to change", "green"))
    for change in plan.changes:
        _indented(console, f"~ {change.summary}", 2)
        for line in change.diff:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
            console.print(Text(f"      {line}", style), soft_wrap=True)


def print_diagnosis(console: Console, report: DiagnosisReport, *, host: str = "") -> None:
    """Root cause first: what it is, what it means, its remedy, the lines it rests on."""
    where = f"{host}: " if host else ""
    if not report.diagnoses:
        _say(console, Text.assemble((where, "bold cyan"), report.headline()))
    for diagnosis in report.diagnoses:
        ranks = f" on {len(diagnosis.ranks)} ranks" if len(diagnosis.ranks) > 1 else ""
        title = (
            f"{diagnosis.signature}{ranks}: {diagnosis.title}",
            _SEVERITY.get(diagnosis.severity, "bold"),
        )
        _say(console, Text.assemble((where, "bold cyan"), title))
        _indented(console, diagnosis.explanation, 2)
        if diagnosis.remedy:
            _indented(console, f"remedy: {diagnosis.remedy}", 2)
        for text, line in {evidence.text: evidence.line for evidence in reversed(diagnosis.evidence)}.items():
            _indented(console, f"line {line}: {text}", 4, "dim")
    if report.diagnoses and report.consequences:
        names = ", ".join(dict.fromkeys(consequence.title for consequence in report.consequences))
        _indented(console, f"then: {names}", 2, "dim")


def _indented(console: Console, text: str, columns: int, style: str = "") -> None:
    for line in typed(text).splitlines():
        _say(console, Text(line, style), indent=columns)


def _say(console: Console, line: Text, *, indent: int = 0) -> None:
    """One line; on a terminal folded between words under itself, elsewhere whole, for people paste and grep it."""
    if not console.is_terminal:
        console.print(Text(" " * indent).append_text(line), soft_wrap=True)
        return
    hang = indent + 2
    for number, part in enumerate(line.wrap(console, max(console.width - hang, 20))):
        console.print(Text(" " * (hang if number else indent)).append_text(part), soft_wrap=True)
