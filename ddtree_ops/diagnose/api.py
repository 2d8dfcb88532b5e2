"""Diagnosis of one invocation: from its lines to a verdict and one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Library, load_library
from ddtree_ops.diagnose.lines import LogLine
from ddtree_ops.diagnose.reduce import DecodeSummary, Diagnosis, reduce_lines
from ddtree_ops.results import CheckResult, Evidence, Verdict

_SENTENCE = re.compile(r"(?<=[\w)\]'\"])\.\s+(?=[A-Z])")

__all__ = ["DiagnosisReport", "Searched", "diagnose"]


def _short(time: str) -> str:
    """Whole seconds; the zone is named where it is known to be UTC."""
    return re.sub(r"[.,]\d+", "", time).replace("T", " ").replace("+00:00", "Z")


@dataclass(frozen=True)
class Searched:
    """How much was read, from when to when (as the lines have it)."""

    lines: int
    begin: str
    end: str
    suppressed: int = 0

    def __str__(self) -> str:
        span = f" from {_short(self.begin)} to {_short(self.end)}" if self.begin else ""
        lost = f", {self.suppressed} lines suppressed by journald" if self.suppressed else ""
        return f"{self.lines} line{'' if self.lines == 1 else 's'}{span}{lost}"


@dataclass(frozen=True)
class DiagnosisReport:
    """What is wrong, root cause first.

    :param verdict: fail with a fatal diagnosis; inconclusive without lines of the server, or where journald dropped
        some; else pass, with degraded and request findings kept in ``diagnoses``.
    :param consequences: what followed the failure; never a cause.
    :param facts: given facts with gaps filled from the log.
    :param stopped: the last life of the server in these lines was ended by a planned stop.
    :param ready: it said that it was ready (which alone is no proof).
    :param server: at least one line is unmistakably an SGLang server's.
    """

    verdict: Verdict
    diagnoses: tuple[Diagnosis, ...]
    consequences: tuple[Diagnosis, ...]
    searched: Searched
    facts: ServiceFacts
    decode: DecodeSummary = field(default_factory=DecodeSummary)
    stopped: bool = False
    ready: bool = False
    server: bool = True

    @property
    def root(self) -> Diagnosis | None:
        """The root cause, or None where nothing fatal was found."""
        return next((item for item in self.diagnoses if item.severity == "fatal"), None)

    def headline(self) -> str:
        """One sentence."""
        root = self.root
        if root is None and self.verdict is Verdict.INCONCLUSIVE:
            if not self.searched.lines:
                return "there is nothing to judge by: no lines were read"
            what = "" if self.server else "no line of an SGLang server among "
            return f"there is not enough to judge by: {what}{self.searched}"
        item = root or next(iter(self.diagnoses), None)
        if item is None:
            return f"nothing wrong was found in {self.searched}"
        ranks = (
            f" on {len(item.ranks)} ranks"
            if len(item.ranks) > 1
            else f" on {item.ranks[0]}"
            if item.ranks
            else ""
        )
        prefix = "" if root else f"nothing fatal in {self.searched}; {item.severity}: "
        return f"{prefix}{item.signature}{ranks}: {_SENTENCE.split(item.explanation, maxsplit=1)[0]}"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of ``diagnose --json``, schema 1."""
        return {
            "schema": 1,
            "verdict": str(self.verdict),
            "headline": self.headline(),
            "diagnoses": [item.to_json() for item in self.diagnoses],
            "consequences": [item.to_json() for item in self.consequences],
            "searched": {
                "lines": self.searched.lines,
                "from": self.searched.begin,
                "to": self.searched.end,
                "suppressed": self.searched.suppressed,
            },
            "facts": self.facts.to_json(),
        }

    def as_check(self, *, host: str = "", source: str = "journal", name: str = "signatures") -> CheckResult:
        """The same as a check result; evidence is that of every diagnosis, root cause first."""
        root = self.root
        facts: dict[str, Any] = {
            "lines": self.searched.lines,
            "from": self.searched.begin,
            "to": self.searched.end,
        }
        if self.diagnoses:
            facts["signatures"] = [item.signature for item in self.diagnoses]
        if self.decode.accept_len is not None:
            facts["accept_length"] = self.decode.accept_len
        if self.decode.cuda_graph is not None:
            facts["cuda_graph"] = self.decode.cuda_graph
        return CheckResult(
            name=name,
            verdict=self.verdict,
            summary=self.headline(),
            host=host,
            facts=facts,
            evidence=tuple(
                Evidence(source, line.text, line.line, item.first)
                for item in self.diagnoses
                for line in item.evidence
            ),
            hint=root.remedy if root else "",
        )


def diagnose(
    lines: Iterable[LogLine], facts: ServiceFacts | None = None, *, library: Library | None = None
) -> DiagnosisReport:
    """Diagnose a run of lines. One pass over ``lines``; memory does not grow with their number.

    :param facts: what is known of the service; gaps are filled from the log itself.
    :param library: other signatures than the shipped ones.
    :raises ConfigError: a signature file is wrong.
    """
    found = reduce_lines(lines, facts or ServiceFacts(), library or load_library())
    if any(item.severity == "fatal" for item in found.diagnoses):
        verdict = Verdict.FAIL
    elif not found.process_lines or not found.server_lines or found.suppressed:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    return DiagnosisReport(
        verdict=verdict,
        diagnoses=found.diagnoses,
        consequences=found.consequences,
        searched=Searched(found.lines, found.begin, found.end, found.suppressed),
        facts=found.facts,
        decode=found.decode,
        stopped=found.stopped,
        ready=found.ready,
        server=found.server_lines,
    )
