"""Workflow commands of GitHub Actions: an annotation for every check that did not pass. Pure."""

from __future__ import annotations

from ddtree_ops.report.clean import clean
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import RunReport

__all__ = ["annotations_text", "workflow_command"]

_LONGEST = 2000


def workflow_command(kind: str, message: str, title: str = "") -> str:
    """``::error title=...::message`` in one line, whatever stands in the two.

    :param kind: ``error``, ``warning`` or ``notice``.
    """

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    shown = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} ..."
    properties = f" title={data(title).replace(':', '%3A').replace(',', '%2C')}" if title else ""
    return f"::{kind}{properties}::{data(shown)}"


def annotations_text(report: RunReport) -> str:
    """Errors first, for GitHub shows ten of a kind: failures are errors, what is inconclusive warnings, the verdict a notice."""
    report = clean(report)
    errors, warnings = [], []
    for target in report.targets:
        errors += [workflow_command("error", error, target.target) for error in target.errors]
        for check in target.checks:
            message = f"{check.summary}\nnext: {check.hint}" if check.hint else check.summary
            title = f"{target.target}: {check.name}"
            if check.verdict is Verdict.FAIL:
                errors.append(workflow_command("error", message, title))
            elif check.verdict is Verdict.INCONCLUSIVE:
                warnings.append(workflow_command("warning", message, f"{title}: inconclusive"))
    if not report.complete:
        warnings.append(workflow_command("warning", "the run was not finished: more was to come", report.id))
    names = ", ".join(f"{target.target} {target.verdict.value}" for target in report.targets) or "no target"
    verdict = workflow_command("notice", f"{report.command}: {report.verdict.value} ({names})", report.id)
    return "\n".join((*errors, *warnings, verdict)) + "\n"
