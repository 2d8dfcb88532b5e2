"""What results come to: a refusal before anything is changed, a verdict after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddtree_ops.errors import CheckFailed, Inconclusive, PreflightError
from ddtree_ops.results import CheckResult, Verdict, worst

if TYPE_CHECKING:
    from ddtree_ops.lint.model import Finding

__all__ = ["judged", "lint_result", "refusal", "result_line"]


def lint_result(finding: Finding) -> CheckResult:
    """A finding of lint as a result; a warning is no pass and no failure."""
    return CheckResult(
        f"lint.{finding.rule}",
        Verdict.FAIL if finding.severity == "error" else Verdict.INCONCLUSIVE,
        finding.message,
        facts={"where": finding.where, "source": finding.source},
        hint=finding.change,
    )


def result_line(result: CheckResult) -> str:
    """``preflight.port: port 30000 is free``."""
    return f"{result.name}: {result.summary}"


def refusal(results: Sequence[CheckResult], host: str) -> PreflightError | None:
    """The error of a preflight: all that failed at once, each with what to do; None where nothing did."""
    bad = [result for result in results if result.verdict is Verdict.FAIL]
    if not bad:
        return None
    more = len(bad) > 1
    advice = [f"    {result.hint}" if more and result.hint else "" for result in bad]
    lines = [
        line for result, hint in zip(bad, advice, strict=True) for line in (result_line(result), hint) if line
    ]
    return PreflightError(
        f"{len(bad)} of {len(results)} preflight checks failed",
        details=tuple(lines),
        hint=f"ddtree-ops doctor {host}   (looks again, changes nothing)"
        if more
        else bad[0].hint or "mend that and deploy again",
    )


def judged(results: Sequence[CheckResult], host: str) -> str:
    """What passed, in a line.

    :raises CheckFailed: one failed. :raises Inconclusive: none did, and one could not be judged, or there is none.
    """
    verdict = worst(result.verdict for result in results)
    telling = [result for result in results if result.verdict is verdict]
    if verdict is Verdict.PASS:
        return "; ".join(result.summary for result in telling)
    if not telling:
        raise Inconclusive("no check was run", hint="a playbook judges by smoke and signatures")
    kind = CheckFailed if verdict is Verdict.FAIL else Inconclusive
    raise kind(
        telling[0].summary,
        details=tuple(map(result_line, telling[1:])),
        hint=telling[0].hint or f"ddtree-ops logs {host} --lines 100",
    )
