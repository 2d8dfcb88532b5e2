"""Findings of lint, one block each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddtree_ops.lint.model import Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_ops.lint.survey import Survey

__all__ = ["print_findings"]

_STYLES = {Severity.ERROR: "bold red", Severity.WARN: "yellow", Severity.INFO: "dim"}


def print_findings(out: Console, survey: Survey) -> None:
    """Print every finding with its reason, source and change, and a last line with the counts.

    What several targets have in common is printed once, with all their names.
    """
    from rich.text import Text

    from ddtree_ops.report.summary import say

    groups: dict[tuple[Any, ...], list[tuple[str, Finding]]] = {}
    for one in survey.targets:
        for finding in one.findings:
            key = (finding.severity, finding.rule, *_of_any(one.target.host.name, finding))
            groups.setdefault(key, []).append((one.target.name, finding))
    for key, same in groups.items():
        finding = same[0][1]
        names = [name for name, _ in same]
        shown = ", ".join(names) if len(names) < 5 else f"{names[0]} to {names[-1]} ({len(names)} targets)"
        where, *texts = key[2:] if len(same) > 1 else (finding.where, *_lines(finding))
        head = Text.assemble(
            (shown, "bold cyan"),
            "  ",
            (finding.severity.value, _STYLES[finding.severity]),
            f"  {finding.rule}  ",
        )
        place = f"  ({finding.place})" if finding.place else ""
        say(out, head.append(str(where)).append(place, "dim"))
        for word, text in texts:
            say(out, Text.assemble((f"{word:<8}", "dim"), text), indent=2)
    say(out, Text(f"lint: {survey.summary()}"))


def _of_any(host: str, finding: Finding) -> tuple[Any, ...]:
    """What is said of a host, with ``NAME`` for its own: the same for all hosts that have the finding in common."""

    def general(text: str) -> str:
        return text.replace(f"hosts.{host}", "hosts.NAME")

    return general(finding.where), *((word, general(text)) for word, text in _lines(finding))


def _lines(finding: Finding) -> list[tuple[str, str]]:
    lines = [("", finding.message)]
    if finding.ignored:
        return [*lines, ("ignored:", finding.ignored)]
    return [*lines, ("why:", finding.reason), ("change:", finding.change), ("source:", finding.source)]
