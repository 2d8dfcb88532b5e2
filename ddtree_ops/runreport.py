"""The report of a run: what every renderer, the history and a comparison of two runs read. Pure data.

A run (``validate``, ``bench``, ``nightly``) has targets; a target has check results and figures. A figure is one number with
its unit, where it was read and how many samples it rests on; labels tell figures of one name apart, as Prometheus' do, so
that a bench point, a load phase and a bar of a histogram are all figures. ``docs/reports.md`` describes the JSON form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ddtree_ops.results import CheckResult, Figure, Verdict, worst

__all__ = ["SCHEMA", "RunReport", "TargetReport", "figures_named"]

SCHEMA = 1
"""Version of the JSON form. It grows when a field is renamed, removed or means something else; not for new fields."""


@dataclass(frozen=True)
class TargetReport:
    """What a run found on one target.

    :param target: name of the target, ``host`` or ``host/service``.
    :param facts: what was measured there: runtime, release, invocation, gpu, interconnect ... JSON-serialisable, no secrets.
    :param figures: of the target as a whole; a check's own stand in its result.
    :param diagnoses: ``DiagnosisReport.to_json()`` of the journals that were read, each with ``source``.
    :param errors: what ended the work on the target early, as a person reads it, with state left and next command.
    """

    target: str
    host: str
    service: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[CheckResult, ...] = ()
    figures: tuple[Figure, ...] = ()
    diagnoses: tuple[Mapping[str, Any], ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of its checks; an error is a failure, no check at all is inconclusive."""
        if self.errors:
            return Verdict.FAIL
        return worst(check.verdict for check in self.checks)

    @property
    def all_figures(self) -> tuple[Figure, ...]:
        """Its own figures, then those of its checks."""
        return (*self.figures, *(figure for check in self.checks for figure in check.figures))

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "target": self.target,
            "host": self.host,
            "service": self.service,
            "verdict": self.verdict.value,
            "facts": dict(self.facts),
            "checks": [check.to_json() for check in self.checks],
            "figures": [figure.to_json() for figure in self.figures],
            "diagnoses": [dict(diagnosis) for diagnosis in self.diagnoses],
            "errors": list(self.errors),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave. :raises KeyError, ValueError, TypeError: it is something else."""
        return cls(
            target=str(document["target"]),
            host=str(document["host"]),
            service=str(document["service"]),
            facts=dict(document["facts"]),
            checks=tuple(CheckResult.from_json(each) for each in document["checks"]),
            figures=tuple(Figure.from_json(each) for each in document["figures"]),
            diagnoses=tuple(dict(each) for each in document["diagnoses"]),
            errors=tuple(str(each) for each in document["errors"]),
        )


@dataclass(frozen=True)
class RunReport:
    """One run over one or more targets.

    :param command: what was run: ``validate``, ``bench`` or ``nightly``.
    :param id: of the run; sorts by time (``20261130T063000Z-ab12``).
    :param started: UTC, ISO 8601; ``ended`` likewise, empty while the run goes on or where it was killed.
    :param complete: False in a report that was written on the way: what is there is true, and more was to come.
    :param options: what the run was asked for, without secrets.
    """

    command: str
    id: str
    started: str
    ended: str = ""
    complete: bool = False
    version: str = ""
    inventory: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[TargetReport, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of its targets; a report that is not complete passes nothing."""
        found = worst(target.verdict for target in self.targets)
        return Verdict.INCONCLUSIVE if found is Verdict.PASS and not self.complete else found

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form, with ``schema``."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "id": self.id,
            "version": self.version,
            "started": self.started,
            "ended": self.ended,
            "complete": self.complete,
            "verdict": self.verdict.value,
            "inventory": self.inventory,
            "options": dict(self.options),
            "targets": [target.to_json() for target in self.targets],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave. :raises KeyError, ValueError, TypeError: another schema, or no such report."""
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}, and this version reads {SCHEMA}")
        return cls(
            command=str(document["command"]),
            id=str(document["id"]),
            started=str(document["started"]),
            ended=str(document["ended"]),
            complete=bool(document["complete"]),
            version=str(document["version"]),
            inventory=str(document["inventory"]),
            options=dict(document["options"]),
            targets=tuple(TargetReport.from_json(each) for each in document["targets"]),
        )


def figures_named(figures: Iterable[Figure], name: str, **labels: str) -> list[Figure]:
    """Those called ``name`` whose labels hold all of ``labels``."""
    return [
        figure
        for figure in figures
        if figure.name == name and all(figure.labels.get(key) == value for key, value in labels.items())
    ]
