"""Findings of lint, one block each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_ops.lint.model import Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_ops.lint.survey import Survey

__all__ = ["print_findings"]

_STYLES = {Severity.ERROR: "bold red", Severity.WARN: "yellow", Severity.INFO: "dim"}


def print_findings(out: Console, survey: Survey) -> None:
    """Print every finding with its reason, source and change, and a last line with the counts."""
    from rich.text import Text

    for one in survey.targets:
        for finding in one.findings:
            style = _STYLES[finding.severity]
            head = Text.assemble(
                (one.target.name, "bold cyan"), "  ", (finding.severity.value, style), f"  {finding.rule}  "
            )
            place = f"  ({finding.place})" if finding.place else ""
            out.print(head.append(finding.where).append(place, "dim"), soft_wrap=True)
            for word, text in _lines(finding):
                out.print(Text.assemble("  ", (f"{word:<8}", "dim"), text), soft_wrap=True)
    out.print(Text(f"lint: {survey.summary()}"), soft_wrap=True)


def _lines(finding: Finding) -> list[tuple[str, str]]:
    lines = [("", finding.message)]
    if finding.ignored:
        return [*lines, ("ignored:", finding.ignored)]
    return [*lines, ("why:", finding.reason), ("change:", finding.change), ("source:", finding.source)]
