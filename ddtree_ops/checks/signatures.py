"""The signature scan: does the journal of one invocation hold a known (or an unknown) fatal failure?"""

from __future__ import annotations

from dataclasses import replace

from ddtree_ops.diagnose.api import DiagnosisReport, diagnose
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.lines import from_entries
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import UnitControl

__all__ = ["signatures"]


def signatures(
    session: Session, target: Target, *, invocation: str | None, patched: bool | None = None
) -> tuple[CheckResult, DiagnosisReport]:
    """Scan what the processes and systemd wrote in one run of the unit.

    A verdict of ``pass`` means that there were lines, none was lost, and none is fatal: no entry at all, messages that
    journald suppressed and entries that cannot be read are inconclusive.

    :param invocation: an ``InvocationID``, or ``current`` or ``previous``.
    :param patched: whether the deployed runner is known to hold patch 0001.
    :raises Inconclusive: ``current`` or ``previous`` names no run that is known.
    """
    host, unit = target.host.name, target.service.unit
    facts = ServiceFacts.of(target, patched=patched)
    entries = UnitControl(session, unit).entries(invocation=invocation or "current")
    found = diagnose(from_entries(entries), facts)
    result = found.as_check(host=host)
    if entries.damaged and result.verdict is Verdict.PASS:
        found = replace(found, verdict=Verdict.INCONCLUSIVE)
        result = replace(
            result,
            verdict=Verdict.INCONCLUSIVE,
            summary=f"{entries.damaged} journal entries could not be read; {result.summary}",
            facts={**result.facts, "damaged": entries.damaged},
        )
    if result.verdict is Verdict.INCONCLUSIVE and not result.hint:
        result = replace(result, hint=_hint(found, host, unit))
    return replace(result, facts={**result.facts, "invocation": invocation or "current"}), found


def _hint(found: DiagnosisReport, host: str, unit: str) -> str:
    if found.searched.suppressed:
        return f"journald dropped messages: set LogRateLimitIntervalSec=0 in {unit}, then start it again"
    if not found.searched.lines:
        return f"may we read the system journal there, and was it rotated away? ddtree-ops logs {host} --invocation all"
    return f"ddtree-ops logs {host} --invocation current"
