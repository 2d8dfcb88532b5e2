"""How a run over one target ended, and what it left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_ops.deploy.plan import Plan
from ddtree_ops.errors import ExitCode, OpsError
from ddtree_ops.results import CheckResult

if TYPE_CHECKING:
    from ddtree_ops.diagnose.api import DiagnosisReport

__all__ = ["Outcome", "Result"]


class Outcome(StrEnum):
    """How a run over one target ended."""

    UNCHANGED = "unchanged"
    DEPLOYED = "deployed"
    PASSED = "passed"
    DONE = "done"
    FAILED = "failed"
    ROLLED_BACK = "rolled-back"
    """It failed, and what passed before serves again."""
    RESTORED = "restored"
    """A rollback that was asked for came to what it should."""
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"


@dataclass
class Result:
    """What a playbook run left behind for one target; JSON through :meth:`to_json`."""

    host: str
    service: str
    outcome: Outcome
    plan: Plan | None = None
    checks: list[CheckResult] = field(default_factory=list)
    diagnosis: DiagnosisReport | None = None
    evidence: Path | None = None
    error: OpsError | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    confirm_until: str = ""

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form; times in seconds."""
        return {
            "schema": 1,
            "host": self.host,
            "service": self.service,
            "outcome": self.outcome.value,
            "plan": self.plan.to_json() if self.plan else None,
            "checks": [check.to_json() for check in self.checks],
            "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
            "evidence": str(self.evidence) if self.evidence else None,
            "confirm_until": self.confirm_until or None,
            "error": self.error.render() if self.error else None,
            "exit_code": int(self.error.exit_code if self.error else ExitCode.OK),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }
