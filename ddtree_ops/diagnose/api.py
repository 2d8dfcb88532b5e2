"""Diagnosis of one invocation: from its lines to a verdict and one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Library, default_library
from ddtree_ops.diagnose.lines import LogLine
from ddtree_ops.diagnose.reduce import Diagnosis, reduce_lines
from ddtree_ops.diagnose.trace import Trace
from ddtree_ops.results import CheckResult, Evidence, Verdict, worst
from ddtree_ops.wording import count, moment_of

if TYPE_CHECKING:
    from ddtree_ops.diagnose.figures import DecodeSummary, Figures

_SENTENCE = re.compile(r"(?<=[\w)\]'\"])\.\s+(?=[A-Z])")

__all__ = ["DiagnosisReport", "Searched", "diagnose", "diagnose_stream", "merged", "unread"]


def _short(time: str) -> str:
    """Whole seconds; the zone is named where it is known to be UTC."""
    return re.sub(r"[.,]\d+", "", time).replace("T", " ").replace("+00:00", "Z")


@dataclass(frozen=True)
class Searched:
    """How much was read, from when to when (as the lines have it).

    :param suppressed: messages that journald dropped; ``damaged``: entries that cannot be read.
    """

    lines: int
    begin: str
    end: str
    suppressed: int = 0
    damaged: int = 0

    def __str__(self) -> str:
        span = f" from {_short(self.begin)} to {_short(self.end)}" if self.begin else ""
        lost = f", {self.suppressed} lines suppressed by journald" if self.suppressed else ""
        if self.damaged:
            lost += f", {self.damaged} journal entries could not be read"
        return f"{count(self.lines, 'line')}{span}{lost}"


@dataclass(frozen=True)
class DiagnosisReport:
    """What is wrong, root cause first.

    :param verdict: fail with a fatal diagnosis; inconclusive without lines of the server, where journald dropped some,
        where the input was cut off, or where the lines end while the server was loading; else pass, with degraded and
        request findings kept in ``diagnoses``.
    :param consequences: what followed the failure; never a cause.
    :param facts: given facts with gaps filled from the log.
    :param stopped: the last life of the server in these lines was ended by a planned stop.
    :param ready: it said that it was ready (which alone is no proof).
    :param server: at least one line is unmistakably an SGLang server's.
    :param loading: the lines end while the server was loading, in a sentence; empty where they do not. ``step`` is the
        last step of that load that was seen.
    :param truncated: how the input was cut off, in a sentence; empty where it is whole.
    :param figures: acceptance, throughput ... over the whole log; None where nobody counted.
    :param trace: way of the parameters that the root cause's numbers name.
    :param patch: whether the deployed runner holds the patch, and whether it is the one that ran, in a sentence.
    :param seen: where the root cause was seen before, in a sentence; empty where nobody looked.
    :param left_out: files of signatures that were wrong and were not used, a sentence each; ``notes`` has them too.
    :param notes: what a reader must know: another run than asked for was explained, the input was cut off.
    :param source: host, file or ``-``.
    :param invocation: the run that was explained; empty for a file.
    :param unread: the source could not be read at all.
    """

    verdict: Verdict
    diagnoses: tuple[Diagnosis, ...]
    consequences: tuple[Diagnosis, ...]
    searched: Searched
    facts: ServiceFacts
    stopped: bool = False
    ready: bool = False
    server: bool = True
    loading: str = ""
    step: str = ""
    truncated: str = ""
    figures: Figures | None = None
    trace: Trace = field(default_factory=Trace)
    patch: str = ""
    seen: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    invocation: str = ""
    unread: bool = False

    @property
    def decode(self) -> DecodeSummary:
        """All decode lines in short."""
        from ddtree_ops.diagnose.figures import DecodeSummary

        return self.figures.decode_summary() if self.figures is not None else DecodeSummary()

    @property
    def root(self) -> Diagnosis | None:
        """The root cause, or None where nothing fatal was found."""
        return next((item for item in self.diagnoses if item.severity == "fatal"), None)

    def headline(self) -> str:
        """One sentence."""
        root = self.root
        if root is None and self.verdict is Verdict.INCONCLUSIVE:
            if self.unread:
                return "there is nothing to judge by: it could not be read"
            if not self.searched.lines:
                return "there is nothing to judge by: no lines were read"
            if self.loading:
                return self.loading
            if self.truncated and self.server and not self.searched.suppressed:
                return f"nothing fatal was found in {self.searched}, but the input is not whole: {self.truncated}"
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
            "source": self.source,
            "verdict": str(self.verdict),
            "headline": self.headline(),
            "diagnoses": [{**item.to_json(), "source": self.source} for item in self.diagnoses],
            "consequences": [{**item.to_json(), "source": self.source} for item in self.consequences],
            "searched": {
                "lines": self.searched.lines,
                "from": self.searched.begin,
                "to": self.searched.end,
                "suppressed": self.searched.suppressed,
                "damaged": self.searched.damaged,
                "sources": [self.source] if self.source and not self.unread else [],
            },
            "facts": self.facts.to_json(),
            "figures": None if self.figures is None else self.figures.to_json(),
            "trace": [step.to_json() for step in self.trace.steps],
            "trace_origin": self.trace.origin,
            "patch": self.patch,
            "seen": self.seen,
            "notes": [*self.notes, *([self.trace.note] if self.trace.note else [])],
            "invocation": self.invocation,
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
        decode = self.decode
        if decode.accept_len is not None:
            facts["accept_length"] = decode.accept_len
        if decode.cuda_graph is not None:
            facts["cuda_graph"] = decode.cuda_graph
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
    lines: Iterable[LogLine],
    facts: ServiceFacts | None = None,
    *,
    library: Library | None = None,
    figures: Callable[[], Figures] | None = None,
    served: bool = False,
) -> DiagnosisReport:
    """Diagnose a run of lines. One pass over ``lines``; memory does not grow with their number.

    :param facts: what is known of the service; gaps are filled from the log itself.
    :param library: other signatures than the shipped ones and the user's own.
    :param figures: asked after the last line, where somebody else has counted all lines; left out: counted here.
    :param served: somebody else has seen that the server got ready; nodes that are not the head never say so.
    :raises ConfigError: a signature file is wrong.
    """
    from ddtree_ops.diagnose.figures import Tally, findings

    known = library or default_library()
    if figures is None:
        tally = Tally()
        figures, lines = tally.figures, _counted(lines, tally.feed_text)
    found = reduce_lines(lines, facts or ServiceFacts(), known)
    loading = found.loading and not served
    counted = figures()
    skip = {item.signature for item in found.diagnoses}
    diagnoses = [*found.diagnoses, *findings(counted, found.facts, known, skip=skip)]
    diagnoses.sort(key=lambda item: item.severity != "fatal")
    if any(item.severity == "fatal" for item in diagnoses):
        verdict = Verdict.FAIL
    elif not found.process_lines or not found.server_lines or found.suppressed or loading:
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    step = (found.step.rstrip(". ") or "its arguments") if loading else ""
    return DiagnosisReport(
        verdict=verdict,
        diagnoses=tuple(diagnoses),
        consequences=found.consequences,
        searched=Searched(found.lines, found.begin, found.end, found.suppressed),
        facts=found.facts,
        stopped=found.stopped,
        ready=found.ready,
        server=found.server_lines,
        loading=_loading(step) if step else "",
        step=step,
        figures=counted,
    )


def _loading(step: str) -> str:
    return f"the log ends while the server was loading (last step seen: {step}); whether it went on cannot be seen"


def _counted(lines: Iterable[LogLine], feed: Callable[[str, str], None]) -> Iterator[LogLine]:
    for line in lines:
        if line.source == "process":
            feed(line.text, line.time)
        yield line


def diagnose_stream(
    stream: BinaryIO | bytes | Iterable[bytes],
    facts: ServiceFacts | None = None,
    *,
    library: Library | None = None,
    source: str = "",
    served: bool = False,
) -> DiagnosisReport:
    """Diagnose the bytes of a log in any wrapping, compressed or not; memory does not grow with their number.

    :param stream: a file opened for bytes, its content, or pieces as they come (``journalctl -o json``).
    :param source: what it is called in the report.
    :param served: as :func:`diagnose` has it.
    :raises ConfigError: a signature file is wrong. :raises OSError: it cannot be read.
    """
    from ddtree_ops.diagnose.figures import Tally
    from ddtree_ops.diagnose.sieve import sift
    from ddtree_ops.diagnose.source import read_chunks

    known = library or default_library()
    tally = Tally()
    chunks = read_chunks(stream)
    sifted = sift(chunks, literals=known.literals(), tally=tally)
    report = diagnose(sifted, facts, library=known, figures=tally.figures, served=served)
    damaged = sifted.damaged
    cut = sifted.truncated or chunks.truncated
    verdict = report.verdict
    if (damaged or cut) and verdict is Verdict.PASS:
        verdict = Verdict.INCONCLUSIVE
    return replace(
        report,
        verdict=verdict,
        searched=replace(report.searched, lines=sifted.lines, damaged=damaged),
        truncated=cut,
        notes=(*report.notes, *([f"the input is not whole: {cut}"] if cut else [])),
        source=source,
    )


def _moment(item: Mapping[str, Any]) -> float:
    """Seconds since the epoch of a finding's first sighting; a time without a zone counts as UTC, none as the last."""
    found = moment_of(str(item["first"]))
    return found.timestamp() if found else float("inf")


def unread(source: str, why: str) -> DiagnosisReport:
    """The report of a source that could not be read: inconclusive, its note says why."""
    return DiagnosisReport(
        verdict=Verdict.INCONCLUSIVE,
        diagnoses=(),
        consequences=(),
        searched=Searched(0, "", ""),
        facts=ServiceFacts(),
        server=False,
        notes=(f"not read: {why}",),
        source=source,
        unread=True,
    )


def merged(reports: Sequence[DiagnosisReport]) -> dict[str, Any]:
    """One document of several reports, root cause first: of the fatal findings the one that was seen first.

    Facts and figures differ from source to source: the document has the facts that all share, and each source's own
    document under ``sources``. One report is its own document. None at all is inconclusive, and so is one that could not
    be read (:func:`unread`) beside others in which nothing fatal was found: the headline names it.
    """
    if len(reports) == 1:
        return {**reports[0].to_json(), "sources": []}
    documents = [report.to_json() for report in reports]
    order = ("fatal", "degraded", "request")
    diagnoses = [item for document in documents for item in document["diagnoses"]]
    diagnoses.sort(
        key=lambda item: (order.index(item["severity"]) if item["severity"] in order else 9, _moment(item))
    )
    first = next((item["source"] for item in diagnoses), documents[0]["source"] if documents else "")
    leading = next((document for document in documents if document["source"] == first), None)
    searched = [document["searched"] for document in documents]
    shared = [document["facts"].items() for document in documents]
    names = [document["source"] for document in documents]
    lost = [report.source for report in reports if report.unread]
    if not diagnoses:
        open_ones = [report.source for report in reports if report.verdict is Verdict.INCONCLUSIVE]
        rest = [name for name in names if name not in lost]
        first = next((name for name in open_ones if name not in lost), rest[0] if rest else "")
        leading = next((document for document in documents if document["source"] == first), None)
    headline = (
        f"{first}: {leading['headline']}" if leading else "there is nothing to judge by: no source was read"
    )
    headline += f"; could not be read: {', '.join(lost)}" if lost else ""
    return {
        "schema": 1,
        "source": "",
        "verdict": str(worst(report.verdict for report in reports)),
        "headline": headline,
        "diagnoses": diagnoses,
        "consequences": [item for document in documents for item in document["consequences"]],
        "searched": {
            "lines": sum(one["lines"] for one in searched),
            "from": min((one["from"] for one in searched if one["from"]), default=""),
            "to": max((one["to"] for one in searched if one["to"]), default=""),
            "suppressed": sum(one["suppressed"] for one in searched),
            "damaged": sum(one["damaged"] for one in searched),
            "sources": [name for name in names if name not in lost],
        },
        "facts": {key: value for key, value in shared[0] if all((key, value) in other for other in shared)}
        if shared
        else {},
        "figures": None,
        "trace": leading["trace"] if leading else [],
        "trace_origin": leading["trace_origin"] if leading else "",
        "patch": leading["patch"] if leading else "",
        "seen": leading["seen"] if leading else "",
        "notes": [
            f"{name}: {note}" for name, one in zip(names, documents, strict=True) for note in one["notes"]
        ],
        "invocation": leading["invocation"] if leading else "",
        "sources": documents,
    }
