"""Lint over several targets, for the command: builds what it has to read, and says where everything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_ops.errors import ExitCode
from ddtree_ops.inventory.models import Target
from ddtree_ops.inventory.yaml_source import load_document
from ddtree_ops.lint.model import Finding, Severity
from ddtree_ops.lint.places import located
from ddtree_ops.lint.run import RULES, lint
from ddtree_ops.lint.runtime import facts_of
from ddtree_ops.runtime import Bundle, build
from ddtree_ops.wording import count

__all__ = ["Survey", "Surveyed", "survey"]


@dataclass(frozen=True)
class Surveyed:
    """What lint found of one target.

    :param digest: of the runtime's bundle.
    :param flags: number of launch flags read from it; 0 where they could not be read.
    """

    target: Target
    digest: str
    flags: int
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "host": self.target.host.name,
            "service": self.target.service.name,
            "runtime": {"name": self.target.runtime.name, "digest": self.digest, "flags": self.flags},
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True)
class Survey:
    """What lint found of all targets."""

    targets: tuple[Surveyed, ...]

    def count(self, severity: Severity) -> int:
        """Findings of a severity."""
        return sum(finding.severity is severity for one in self.targets for finding in one.findings)

    def exit_code(self, *, strict: bool) -> ExitCode:
        """78 with an error; 5 with a warning where it is strict; else 0. Nothing looked at is never a pass."""
        if not self.targets:
            return ExitCode.INCONCLUSIVE
        if self.count(Severity.ERROR):
            return ExitCode.CONFIG
        return ExitCode.CHECK_FAILED if strict and self.count(Severity.WARN) else ExitCode.OK

    def summary(self) -> str:
        """One line for a person."""
        ignored = sum(bool(finding.ignored) for one in self.targets for finding in one.findings)
        parts = [
            count(len(self.targets), "target"),
            count(len(RULES), "rule"),
            count(self.count(Severity.ERROR), "error"),
            count(self.count(Severity.WARN), "warning"),
            *([f"{ignored} ignored"] if ignored else []),
        ]
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The document of ``ddtree-ops lint --json``."""
        return {
            "schema": 1,
            "counts": {severity.value: self.count(severity) for severity in Severity},
            "targets": [one.to_json() for one in self.targets],
        }


def survey(
    targets: Sequence[Target],
    inventory: str,
    *,
    settings: Sequence[str] = (),
    runtime: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Survey:
    """Lint targets. No host is contacted; a runtime that is not in the cache is built.

    :param inventory: path of the file they come from.
    :raises BuildError: a runtime cannot be built.
    """

    def found() -> Iterator[Surveyed]:
        document = load_document(Path(inventory).expanduser(), defer=True)
        bundles: dict[str, Bundle] = {}
        for target in targets:
            key = repr(target.runtime)
            bundle = bundles[key] = bundles.get(key) or build(target.runtime, progress=progress)
            facts = facts_of(bundle)
            findings = located(lint(target, facts), target, document, settings=settings, runtime=runtime)
            yield Surveyed(target, bundle.digest, len(facts.flags.flags) if facts.flags else 0, findings)

    return Survey(tuple(found()))
