"""The report of a validation as it grows: results come from several targets at once."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ddtree_ops import __version__
from ddtree_ops.checks.validation.run import Validation
from ddtree_ops.errors import OpsError
from ddtree_ops.inventory.models import Target
from ddtree_ops.results import CheckResult
from ddtree_ops.runreport import RunReport, TargetReport

__all__ = ["Gathered"]


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


class Gathered:
    """Results of all targets. Thread-safe.

    :param options: what the run was asked for, without secrets.
    """

    def __init__(self, targets: Sequence[Target], *, options: Mapping[str, Any], inventory: str) -> None:
        begun = _now()
        self._head = RunReport(
            "validate",
            f"{begun:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
            begun.isoformat(),
            version=__version__,
            inventory=inventory,
            options=options,
        )
        self._lock = threading.Lock()
        self._targets = {
            target.name: TargetReport(target.name, target.host.name, target.service.name)
            for target in targets
        }

    def add(self, target: Target, result: CheckResult) -> None:
        """One result, as it comes."""
        with self._lock:
            known = self._targets[target.name]
            self._targets[target.name] = replace(known, checks=(*known.checks, result))

    def know(self, target: Target, facts: Mapping[str, Any]) -> None:
        """What is known of a target before its first result."""
        with self._lock:
            self._targets[target.name] = replace(self._targets[target.name], facts=dict(facts))

    def done(self, target: Target, outcome: Validation | OpsError) -> None:
        """All of a target, or what ended the work on it."""
        with self._lock:
            if isinstance(outcome, OpsError):
                known = self._targets[target.name]
                self._targets[target.name] = replace(known, errors=(*known.errors, outcome.render()))
            else:
                self._targets[target.name] = outcome.report(target)

    def report(self, *, complete: bool) -> RunReport:
        """What there is.

        :param complete: False while more is to come, or where the run was broken off.
        """
        with self._lock:
            targets = tuple(self._targets.values())
        ended = _now().isoformat() if complete else ""
        return replace(self._head, targets=targets, complete=complete, ended=ended)
