"""The result model every layer speaks: verdicts, evidence, check results and progress events.

Pure data. ``report`` renders it; ``checks``, ``diagnose`` and ``deploy`` produce it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from ddtree_ops.errors import ExitCode

__all__ = [
    "RUN_END",
    "CheckResult",
    "Event",
    "EventKind",
    "Evidence",
    "Figure",
    "Reporter",
    "Verdict",
    "exit_code_of",
    "worst",
]


class Verdict(StrEnum):
    """Outcome of a check. No data is never :attr:`PASS`: it is :attr:`INCONCLUSIVE`."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Evidence:
    """One thing a verdict rests on.

    :param source: where it was read (``journal``, ``http GET /server_info``, ``systemctl show``, a file name).
    :param text: the text itself, redacted, without trailing newline.
    :param line: 1-based line number within ``source`` where that makes sense.
    :param time: UTC time in ISO 8601, or empty.
    """

    source: str
    text: str
    line: int | None = None
    time: str = ""


@dataclass(frozen=True)
class Figure:
    """One number that a report shows, compares or exports.

    :param name: what it is, in snake case, without its unit (``accept_length``, ``ttft``); docs/reports.md lists them.
    :param value: None where it was asked for and could not be had: never 0 in its place.
    :param unit: ``s``, ``tokens``, ``tokens/s``, ``tokens/step``, ``GB``, ``ratio``, ``steps``, ``count`` ...
    :param source: where it was read (``POST /generate meta_info``, ``journal``, ``systemctl show`` ...).
    :param samples: measurements that it rests on; 1 for a single reading.
    :param spread: median absolute deviation of the samples, in the same unit; None where there is one sample.
    :param labels: what tells it from others of its name: ``mode``, ``budget``, ``topk``, ``concurrency``, ``stat``, ``phase``.
    """

    name: str
    value: float | None
    unit: str
    source: str
    samples: int = 1
    spread: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {**asdict(self), "labels": dict(self.labels)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave; fields that are not known are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in document.items() if name in known})


@dataclass(frozen=True)
class CheckResult:
    """What one check found on one host.

    :param name: stable dotted id (``smoke``, ``smoke.stable``, ``signatures``, ``preflight.disk``).
    :param summary: one sentence for a person.
    :param facts: figures behind the sentence, JSON-serialisable; names carry their unit
        (``ready_s``, ``tokens_per_s``, ``accept_length``).
    :param hint: next command to type when the verdict is not a pass.
    :param figures: numbers that reports show and runs are compared by, each with unit, source and number of samples.
    :param seconds: how long the check took; 0 where that was not measured.
    """

    name: str
    verdict: Verdict
    summary: str
    host: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    hint: str = ""
    figures: tuple[Figure, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True for a pass only."""
        return self.verdict is Verdict.PASS

    def to_json(self) -> dict[str, Any]:
        """Stable JSON form."""
        return {
            "host": self.host,
            "name": self.name,
            "verdict": self.verdict.value,
            "summary": self.summary,
            "facts": dict(self.facts),
            "evidence": [asdict(item) for item in self.evidence],
            "hint": self.hint,
            "figures": [figure.to_json() for figure in self.figures],
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` gave. :raises KeyError, ValueError, TypeError: it is something else."""
        return cls(
            name=str(document["name"]),
            verdict=Verdict(document["verdict"]),
            summary=str(document["summary"]),
            host=str(document["host"]),
            facts=dict(document["facts"]),
            evidence=tuple(Evidence(**each) for each in document["evidence"]),
            hint=str(document["hint"]),
            figures=tuple(Figure.from_json(each) for each in document.get("figures", ())),
            seconds=float(document.get("seconds", 0.0)),
        )


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine verdicts: fail > inconclusive > pass. Nothing, or only skipped checks, is inconclusive."""
    seen = set(verdicts)
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS):
        if verdict in seen:
            return verdict
    return Verdict.INCONCLUSIVE


def exit_code_of(verdict: Verdict) -> ExitCode:
    """The exit status a verdict stands for."""
    return {
        Verdict.PASS: ExitCode.OK,
        Verdict.FAIL: ExitCode.CHECK_FAILED,
        Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        Verdict.SKIPPED: ExitCode.INCONCLUSIVE,
    }[verdict]


class EventKind(StrEnum):
    """What a progress event announces."""

    START = "start"
    PROGRESS = "progress"
    DONE = "done"
    FAIL = "fail"
    UNSURE = "unsure"
    NOTE = "note"

    @classmethod
    def end(cls, verdict: Verdict) -> EventKind:
        """How a phase with this verdict ended; what was skipped is done."""
        return {Verdict.FAIL: cls.FAIL, Verdict.INCONCLUSIVE: cls.UNSURE}.get(verdict, cls.DONE)


RUN_END = "end"
"""Phase of the event that ends a target's part in a run over several hosts; its message is the outcome."""


@dataclass(frozen=True)
class Event:
    """Progress of one phase on one host; rendered live on a terminal and as lines elsewhere.

    :param phase: playbook step name (``preflight``, ``build``, ``push`` ...).
    :param message: one line for a person.
    :param fraction: 0..1 where known.
    :param elapsed_s: seconds since the phase began, on DONE, FAIL and UNSURE.
    """

    kind: EventKind
    host: str
    phase: str
    message: str = ""
    fraction: float | None = None
    elapsed_s: float | None = None


Reporter = Callable[[Event], None]
"""Where events go. Must be cheap and safe to call from any thread."""
