"""The report of ``doctor``: a line a host, then what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ddtree_ops.report.summary import indented, say, table_lines
from ddtree_ops.results import CheckResult, Verdict

if TYPE_CHECKING:
    from ddtree_ops.deploy.doctor import Examination

__all__ = ["print_doctor"]

_MARK = {
    Verdict.PASS: ("✓", "pass", "green"),
    Verdict.FAIL: ("✗", "fail", "bold red"),
    Verdict.INCONCLUSIVE: ("?", "warn", "yellow"),
    Verdict.SKIPPED: ("-", "skip", "dim"),
}
_HEAD = ("HOST", "VERDICT", "PASS", "WARN", "FAIL", "TIME", "FOUND")
_TOLD = ("preflight.gpu", "preflight.venv", "preflight.model", "preflight.port")


def print_doctor(console: Console, found: Sequence[Examination], *, everything: bool = False) -> None:
    """All hosts, a line each, then their warnings and failures with hints.

    :param everything: the checks that passed too.
    """
    styles = [["bold cyan", _MARK[one.verdict][2], "", "", "", "", ""] for one in found]
    for line in table_lines(_HEAD, [_cells(one) for one in found], styles):
        say(console, line)
    for one in found:
        for check in one.checks:
            if everything or check.verdict not in (Verdict.PASS, Verdict.SKIPPED):
                _print_check(console, one.target, check)


def _cells(one: Examination) -> tuple[str, ...]:
    numbers = [str(len(one.of(verdict))) for verdict in (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL)]
    told = "; ".join(check.summary for check in one.checks if check.name in _TOLD and check.ok)
    return (one.target, "{} {}".format(*_MARK[one.verdict][:2]), *numbers, f"{one.seconds:.1f}s", told)


def _print_check(console: Console, host: str, check: CheckResult) -> None:
    mark, _, style = _MARK[check.verdict]
    name = check.name.removeprefix("preflight.")
    say(
        console,
        Text.assemble((f"{mark} ", style), (f"{host} ", "cyan"), (f"{name}: ", "bold"), check.summary),
    )
    if check.verdict is Verdict.PASS:
        return
    for item in check.evidence[:3]:
        line = next(iter(item.text.splitlines()), "")
        if line and line not in check.summary:
            indented(console, f"{item.source}: {line}", 4, "dim")
    if check.hint:
        indented(console, f"next: {check.hint}", 4)
