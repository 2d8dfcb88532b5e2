"""The three answers a check can give, and how sizes are said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddtree_ops.results import CheckResult, Evidence, Verdict

__all__ = ["failed", "listed", "passed", "size", "unsure"]

GIB = 1 << 30
MIB = 1 << 20


def passed(name: str, summary: str, **facts: Any) -> CheckResult:
    """Nothing stands in the way."""
    return CheckResult(f"preflight.{name}", Verdict.PASS, summary, facts=facts)


def failed(name: str, summary: str, hint: str, *evidence: Evidence, **facts: Any) -> CheckResult:
    """A deployment would not come up, or would do harm: it is refused."""
    return CheckResult(f"preflight.{name}", Verdict.FAIL, summary, "", facts, evidence, hint)


def unsure(name: str, summary: str, hint: str, *evidence: Evidence, **facts: Any) -> CheckResult:
    """A warning: it may come up, and a person should know; a deployment goes on and says so."""
    return CheckResult(f"preflight.{name}", Verdict.INCONCLUSIVE, summary, "", facts, evidence, hint)


def size(number: float) -> str:
    """Bytes for people: ``549.5 GiB``, ``64 MiB``."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def listed(items: Sequence[object], most: int = 4) -> str:
    """The first few, and how many more."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown
