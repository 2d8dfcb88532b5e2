"""The signature scan: does the journal of one invocation hold a known (or an unknown) fatal failure?"""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from ddtree_ops.diagnose.api import DiagnosisReport, diagnose_stream
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.control import UnitControl

if TYPE_CHECKING:
    from ddtree_ops.diagnose.library import Library

__all__ = ["hint_for", "prepare", "scan", "signatures"]

_READING_S = 900.0
"""Seconds that a journal may take to arrive: a week of one is some hundred MB."""


def prepare() -> threading.Thread:
    """Load what a scan needs, in the background: for who waits for something else meanwhile.

    A signature file of the user that is wrong is left for the scan to tell of. The thread is waited for when the program
    ends: one that is inside RE2 then would abort it.
    """

    def load() -> None:
        from ddtree_ops.diagnose.library import lenient_library

        diagnose_stream(b"", library=lenient_library()[0])

    thread = threading.Thread(target=load, name="signatures")
    thread.start()
    return thread


def signatures(
    session: Session, target: Target, *, invocation: str | None, patched: bool | None = None
) -> tuple[CheckResult, DiagnosisReport]:
    """Scan what the processes and systemd wrote in one run of the unit.

    A verdict of ``pass`` means that there were lines, none was lost, and none is fatal: no entry at all, messages that
    journald suppressed and entries that cannot be read are inconclusive. Whether the server got ready other checks judge.

    :param invocation: an ``InvocationID``, or ``current`` or ``previous``.
    :param patched: whether the deployed runner is known to hold patch 0001.
    :raises Inconclusive: ``current`` or ``previous`` names no run that is known.
    """
    host, unit = target.host.name, target.service.unit
    facts = ServiceFacts.of(target, patched=patched)
    found = scan(session, target, invocation=invocation, facts=facts, served=True)
    result = found.as_check(host=host)
    if found.left_out:
        result = replace(result, facts={**result.facts, "left_out": list(found.left_out)})
    if found.searched.damaged and result.verdict is Verdict.INCONCLUSIVE:
        result = replace(
            result,
            summary=f"{found.searched.damaged} journal entries could not be read; {result.summary}",
            facts={**result.facts, "damaged": found.searched.damaged},
        )
    if result.verdict is Verdict.INCONCLUSIVE and not result.hint:
        result = replace(result, hint=hint_for(found, host, unit))
    return replace(result, facts={**result.facts, "invocation": invocation or "current"}), found


def scan(
    session: Session,
    target: Target,
    *,
    invocation: str | None,
    facts: ServiceFacts,
    library: Library | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    served: bool = False,
) -> DiagnosisReport:
    """Diagnose the journal of one run as it arrives; memory does not grow with its length.

    :param since: when the run began, by the host's clock: then the kernel's messages from then on are read too.
    :param until: when it was over; None: it runs, or that is not known.
    :param library: left out: the shipped signatures and the user's own. A wrong file of the user's judges no service: it
        is left out, and the report's notes say so.
    :param served: somebody else has seen that the server got ready.
    :raises Inconclusive: ``current`` or ``previous`` names no run that is known.
    """
    left_out: tuple[str, ...] = ()
    if library is None:
        from ddtree_ops.diagnose.library import lenient_library

        library, left_out = lenient_library()
    journal = UnitControl(session, target.service.unit).raw(
        invocation=invocation or "current",
        since=None if since is None else since.isoformat(),
        until=None if since is None or until is None else until.isoformat(),
        kernel=since is not None,
        deadline=_READING_S,
    )
    found = diagnose_stream(journal, facts, library=library, source=target.name, served=served)
    return replace(found, left_out=left_out, notes=(*found.notes, *left_out)) if left_out else found


def hint_for(found: DiagnosisReport, host: str, unit: str) -> str:
    """What to do about an inconclusive report."""
    if found.searched.suppressed:
        return f"journald dropped messages: set LogRateLimitIntervalSec=0 in {unit}, then start it again"
    if not found.searched.lines:
        return f"may we read the system journal there, and was it rotated away? ddtree-ops logs {host} --invocation all"
    return f"ddtree-ops logs {host} --invocation current"
