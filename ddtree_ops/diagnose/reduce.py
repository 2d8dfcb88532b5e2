"""From events to the one cause: the deepest cause of the earliest failure, voted over ranks.

What only frames a failure (``Scheduler hit an exception``) or follows it (SIGQUIT, lost peers, systemd's
``code=killed``) is a consequence, never the cause; it becomes the finding only where nothing deeper was seen, and
never after a planned stop. Memory is bounded: a failure seen a million times is one group with a count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ddtree_ops.diagnose.events import (
    DecodeFigures,
    ExceptionBlock,
    Frame,
    PhaseKind,
    ServerArgs,
    TextLine,
    Traceback,
    parse_decode,
    parse_events,
    parse_phase,
    parse_prefix,
)
from ddtree_ops.diagnose.explain import explain_sizes, tail
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Library, Match, Severity, Where
from ddtree_ops.diagnose.lines import LogLine, Source
from ddtree_ops.secret import redact

__all__ = ["DecodeSummary", "Diagnosis", "EvidenceLine", "Reduction", "fingerprint", "reduce_lines"]

_EVIDENCE = 6
_GROUPS = 256
_WINDOW_S = 10.0
_TEXT = 600


@dataclass(frozen=True)
class EvidenceLine:
    """A line a finding rests on: 1-based number and redacted text."""

    line: int
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """One finding.

    :param signature: id of the signature, or ``unknown``.
    :param ranks: ``TP0`` ... in natural order; empty where lines name no rank.
    :param count: how often it was seen.
    :param first: time of the first, as the log has it.
    :param fingerprint: 12 hex digits, the same for the same failure whatever its line numbers, addresses, ranks, sizes.
    :param traceback: the reduced traceback: last frame inside sglang, last frame, exception.
    """

    signature: str
    severity: Severity
    title: str
    explanation: str
    remedy: str
    ranks: tuple[str, ...]
    count: int
    first: str
    fingerprint: str
    evidence: tuple[EvidenceLine, ...]
    traceback: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable, names as documented for ``diagnose --json``."""
        return {
            "signature": self.signature,
            "severity": self.severity,
            "title": self.title,
            "explanation": self.explanation,
            "remedy": self.remedy,
            "ranks": list(self.ranks),
            "count": self.count,
            "first": self.first,
            "fingerprint": self.fingerprint,
            "evidence": [{"line": item.line, "text": item.text} for item in self.evidence],
            "traceback": list(self.traceback),
        }


@dataclass(frozen=True)
class DecodeSummary:
    """Figures over all decode lines seen.

    :param lines: number of decode lines.
    :param accept_len: mean over the lines that print it; None without speculation.
    :param cuda_graph: whether the last line ran in a graph; None where not printed.
    """

    lines: int = 0
    accept_len: float | None = None
    cuda_graph: bool | None = None


@dataclass(frozen=True)
class Reduction:
    """What was found in a run of lines; diagnoses root cause first.

    :param server_lines: at least one line is unmistakably an SGLang server's.
    """

    diagnoses: tuple[Diagnosis, ...]
    consequences: tuple[Diagnosis, ...]
    facts: ServiceFacts
    lines: int
    process_lines: int
    server_lines: bool
    suppressed: int
    begin: str
    end: str
    stopped: bool
    ready: bool
    decode: DecodeSummary


_NORMAL: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"0x[0-9a-fA-F]+"), "X"),
    (re.compile(r"(?:TP|DP|PP|EP)\d+"), "R"),
    (re.compile(r"(?:/[\w.@+-]+)+/"), "/"),
    (re.compile(r"\b[0-9a-f]{16,64}\b"), "X"),
    (re.compile(r"\d+(?:\.\d+)?"), "N"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(kind: str, message: str, frame: Frame | None) -> str:
    """12 hex digits of what stays the same: exception, message without numbers and paths, function it came from."""
    text = message[:400].partition("\n")[0]
    for pattern, replacement in _NORMAL:
        text = pattern.sub(replacement, text)
    place = f"{frame.file.rpartition('/')[2]}:{frame.function}" if frame else ""
    return hashlib.sha256(f"{kind}\n{text.strip()}\n{place}".encode("utf-8", "replace")).hexdigest()[:12]


def _sglang_frame(frames: Sequence[Frame]) -> Frame | None:
    return next(
        (frame for frame in reversed(frames) if "/sglang/" in frame.file), frames[-1] if frames else None
    )


def _clip(text: str, limit: int = _TEXT) -> str:
    text = redact(text[: 2 * limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _when(text: str) -> float | None:
    if len(text) < 19:
        return None
    try:
        return datetime.fromisoformat(text[:19].replace("T", " ")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _natural(text: str) -> list[tuple[int, str]]:
    return [
        (int(part[:9]), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part
    ]


@dataclass
class _Group:
    """All sightings of one finding."""

    signature: str
    severity: Severity
    title: str
    explanation: str
    remedy: str
    print: str
    number: int
    first: str
    life: int
    role: str
    alone: bool
    order: int
    stopping: bool
    traceback: tuple[str, ...] = ()
    count: int = 0
    ranks: set[str] = field(default_factory=set)
    voters: set[str] = field(default_factory=set)
    evidence: list[EvidenceLine] = field(default_factory=list)

    def seen(self, rank: str, pid: int | None, evidence: Sequence[EvidenceLine]) -> None:
        self.count += 1
        if rank and len(self.ranks) < 4096:
            self.ranks.add(rank)
        if len(self.voters) < 4096:
            self.voters.add(rank or (f"pid {pid}" if pid is not None else ""))
        room = _EVIDENCE - len(self.evidence)
        self.evidence.extend(evidence[: max(room, 0)])

    def diagnosis(self) -> Diagnosis:
        return Diagnosis(
            signature=self.signature,
            severity=self.severity,
            title=self.title,
            explanation=self.explanation,
            remedy=self.remedy,
            ranks=tuple(sorted(self.ranks, key=_natural)),
            count=self.count,
            first=self.first,
            fingerprint=self.print,
            evidence=tuple(self.evidence),
            traceback=self.traceback,
        )


@dataclass
class _Doubtful:
    """An unexplained traceback without a fatal header: fatal unless the server is seen to live on."""

    group: _Group
    number: int
    life: int


_WHERE: dict[Source, Where] = {"process": "log", "systemd": "systemd", "kernel": "kernel"}
_QUIET = frozenset(
    {
        "KeyboardInterrupt",
        "SystemExit",
        "asyncio.exceptions.CancelledError",
        "CancelledError",
        "GeneratorExit",
    }
)
_REQUEST = re.compile(r"\[[^\]]{19,80}\] (?:Receive|Finish): obj=")
"""``--log-requests``: what users wrote is no evidence."""
_SUPPRESSED = re.compile(r"Suppressed (\d{1,9}) messages from")
_STOPPING = re.compile(r"Stopping \S")
_ALIVE = re.compile(r"(?:Prefill batch|Decode batch)|HTTP/1\.[01]\" 2\d\d")


class _Reducer:
    def __init__(self, library: Library, facts: ServiceFacts) -> None:
        self.library = library
        self.facts = facts
        self.groups: dict[tuple[int, str, str], _Group] = {}
        self.doubtful: list[_Doubtful] = []
        self.life = 0
        self.stopping = False
        self.stopped = False
        self.ready = False
        self.suppressed = 0
        self.decode_lines = 0
        self.last_decode: DecodeFigures | None = None
        self.accepted = 0.0
        self.accept_lines = 0

    def add(
        self,
        name: str,
        key: str,
        make: Mapping[str, Any],
        number: int,
        when: str,
        rank: str,
        pid: int | None,
        evidence: Sequence[EvidenceLine],
    ) -> _Group | None:
        full = (self.life, name, key)
        group = self.groups.get(full)
        if group is None:
            if len(self.groups) >= _GROUPS:
                return None
            group = _Group(
                signature=name,
                print=key,
                number=number,
                first=when,
                life=self.life,
                order=len(self.groups),
                stopping=self.stopping,
                **make,
            )
            self.groups[full] = group
        elif number < group.number:
            group.number, group.first = number, when
        group.seen(rank, pid, evidence)
        return group

    def known(
        self,
        match: Match,
        number: int,
        when: str,
        rank: str,
        pid: int | None,
        evidence: Sequence[EvidenceLine],
        frame: Frame | None = None,
        traceback: tuple[str, ...] = (),
    ) -> None:
        signature = match.signature
        if signature.severity == "benign":
            return
        make = {
            "severity": signature.severity,
            "title": signature.title,
            "explanation": redact(match.explanation),
            "remedy": redact(match.remedy),
            "role": signature.role,
            "alone": signature.alone,
            "traceback": traceback,
        }
        key = fingerprint(signature.id, "", frame)
        self.add(signature.id, key, make, number, when, rank, pid, evidence)

    def text(self, event: TextLine) -> None:
        line, body = event.line, event.body
        if line.source == "systemd":
            if _STOPPING.match(body):
                self.stopping = self.stopped = True
            elif body.startswith("Started "):
                self.stopping = False
        elif line.source == "process":
            self.server(event)
        if "Suppressed " in body and (found := _SUPPRESSED.search(body)):
            self.suppressed += int(found[1])
        match = self.library.match(body, _WHERE[line.source], self.facts)
        if match is None or (match.signature.severity == "request" and match.signature.role == "wrapper"):
            return
        evidence = (EvidenceLine(line.number, _clip(line.text)),)
        self.known(match, line.number, event.time, event.rank, line.pid, evidence)

    def server(self, event: TextLine) -> None:
        text = event.line.text
        figures = parse_decode(text)
        if figures is not None:
            self.decode_lines += 1
            self.last_decode = figures
            if figures.accept_len is not None:
                self.accepted += figures.accept_len
                self.accept_lines += 1
        if self.doubtful and _ALIVE.search(event.body):
            for item in self.doubtful:
                if item.life == self.life and item.number < event.line.number:
                    item.group.severity = "degraded"
            self.doubtful = [item for item in self.doubtful if item.group.severity != "degraded"]
        phase = parse_phase(text) if figures is None else None
        if phase is None:
            return
        if phase.kind is PhaseKind.READY:
            self.ready = True
        elif phase.kind is PhaseKind.STOPPING:
            self.stopping = self.stopped = True
        elif phase.kind is PhaseKind.LIMITS:
            self.facts = self.facts.learn_limits(phase.fields)
        elif phase.kind is PhaseKind.DRAFT_READY:
            size = re.search(r"block_size=(\d{1,4})", event.body)
            if size:
                self.facts = self.facts.learn({"block_size": int(size[1])})

    def arguments(self, event: ServerArgs) -> None:
        if self.groups or self.stopped:
            self.life += 1
        self.stopping = self.stopped = self.ready = False
        self.facts = self.facts.learn_arguments(event.values)

    def traceback(self, record: Traceback) -> None:
        fatal = False
        for text in (record.header, record.before):
            match = self.library.match(text, "log", self.facts) if text else None
            if match is None:
                continue
            if match.signature.severity == "benign":
                return
            if match.signature.severity == "request":
                self.request(record, match)
                return
            evidence = (EvidenceLine(record.number, _clip(text)),)
            self.known(match, record.number, record.time, record.rank, record.pid, evidence)
            fatal = fatal or match.signature.role == "wrapper"
        for block in record.exceptions:
            found = self.library.match(block.text, "traceback", self.facts, block.frames)
            if found is None:
                continue
            self.known(
                found,
                block.number or record.number,
                record.time,
                record.rank,
                record.pid,
                _evidence(block, record),
                _sglang_frame(block.frames),
                _reduced(block),
            )
            return
        cause = next((block for block in record.exceptions if block.type), None)
        if cause is not None and cause.type in _QUIET:
            return
        self.unknown(record, cause or (record.exceptions[0] if record.exceptions else None), fatal)

    def request(self, record: Traceback, match: Match) -> None:
        block = next((block for block in record.exceptions if block.type), None)
        if block is None:
            return
        make = {
            "severity": "request",
            "title": match.signature.title,
            "explanation": f"{match.explanation} {_clip(block.text, 300)}",
            "remedy": "",
            "role": "cause",
            "alone": False,
            "traceback": _reduced(block),
        }
        key = fingerprint(block.type, block.message, _sglang_frame(block.frames))
        self.add(
            match.signature.id,
            key,
            make,
            record.number,
            record.time,
            record.rank,
            record.pid,
            _evidence(block, record),
        )

    def unknown(self, record: Traceback, block: ExceptionBlock | None, fatal: bool) -> None:
        if block is None:
            return
        frame = _sglang_frame(block.frames)
        name = block.type or "a traceback that is cut off before its exception"
        where = f", raised in {frame.function} ({tail(frame.file)}:{frame.line})" if frame else ""
        said = _clip((block.text or name).partition(chr(10))[0], 300).rstrip(". ")
        text = f"{said}{where}: no signature explains it. "
        text += explain_sizes(block.text, self.facts)
        if "CUDA error" in block.message:
            text += " CUDA reports errors late: the frame may be after the faulty call."
        make = {
            "severity": "fatal",
            "title": f"unknown failure: {name.rpartition('.')[2]}",
            "explanation": text.strip(),
            "remedy": "keep the journal of this invocation; search the message and the frame in the issues of sglang",
            "role": "cause",
            "alone": False,
            "traceback": _reduced(block),
        }
        key = fingerprint(block.type, block.message, frame)
        number = block.number or record.number
        group = self.add(
            "unknown", key, make, number, record.time, record.rank, record.pid, _evidence(block, record)
        )
        if group is None:
            return
        if fatal:
            group.severity = "fatal"
            self.doubtful = [item for item in self.doubtful if item.group is not group]
        elif group.count == 1 and len(self.doubtful) < _GROUPS:
            self.doubtful.append(_Doubtful(group, number, self.life))

    def decode(self) -> DecodeSummary:
        return DecodeSummary(
            lines=self.decode_lines,
            accept_len=round(self.accepted / self.accept_lines, 3) if self.accept_lines else None,
            cuda_graph=self.last_decode.cuda_graph if self.last_decode else None,
        )

    def finish(self) -> tuple[list[Diagnosis], list[Diagnosis]]:
        roots: list[_Group] = []
        others: list[_Group] = []
        notes: list[_Group] = []
        for life in sorted({group.life for group in self.groups.values()}):
            groups = sorted(
                (g for g in self.groups.values() if g.life == life), key=lambda g: (g.number, g.order)
            )
            causes = [g for g in groups if g.severity == "fatal" and g.role == "cause"]
            causes = [g for g in causes if not (g.stopping and g.signature == "unknown")]
            notes += [g for g in groups if g.severity != "fatal"]
            root = _vote(causes)
            if root is None:
                rest = [g for g in groups if g.severity == "fatal" and g.alone and not g.stopping]
                root = rest[0] if rest else None
            if root is not None:
                roots.append(root)
            others += [g for g in groups if g.severity == "fatal" and g is not root]
        return _merged(roots) + _merged(notes), _merged(others)


def _vote(causes: Sequence[_Group]) -> _Group | None:
    """The cause most ranks report among those of the first failure; the earliest of several."""
    if not causes:
        return None
    start = _when(causes[0].first)
    times = [(group, _when(group.first)) for group in causes]
    near = [g for g, at in times if start is None or at is None or abs(at - start) <= _WINDOW_S]
    return max(near, key=lambda group: (len(group.voters), -group.number, -group.order))


def _merged(groups: Sequence[_Group]) -> list[Diagnosis]:
    """One diagnosis a signature and fingerprint, counts of several lives added up, order kept."""
    kept: dict[tuple[str, str], _Group] = {}
    for group in groups:
        first = kept.setdefault((group.signature, group.print), group)
        if first is not group:
            first.count += group.count
            first.ranks |= group.ranks
    return [group.diagnosis() for group in kept.values()]


def _evidence(block: ExceptionBlock, record: Traceback) -> tuple[EvidenceLine, ...]:
    return (
        EvidenceLine(block.number or record.number, _clip(block.text.partition("\n")[0] or record.header)),
    )


def _reduced(block: ExceptionBlock) -> tuple[str, ...]:
    frames: list[Frame] = []
    inner = _sglang_frame(block.frames)
    if inner is not None:
        frames.append(inner)
        if block.frames[-1] != inner:
            frames.append(block.frames[-1])
    lines = []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"    {frame.code}")
    return tuple(_clip(line) for line in [*lines, block.text.partition("\n")[0] or "(cut off)"])


def reduce_lines(lines: Iterable[LogLine], facts: ServiceFacts, library: Library) -> Reduction:
    """Read lines once and reduce them; memory does not grow with their number."""
    reducer = _Reducer(library, facts)
    count = process = 0
    begin = end = ""
    server = False

    def counted() -> Iterable[LogLine]:
        nonlocal count, process, begin, end, server
        for line in lines:
            count += 1
            process += line.source == "process"
            server = server or parse_prefix(line.text) is not None or parse_phase(line.text) is not None
            when = line.time
            if not when and line.text[:3] == "[20":
                when = line.text[1:20]
            if when:
                begin, end = begin or when, when
            if not _REQUEST.match(line.text):
                yield line

    for event in parse_events(counted()):
        if isinstance(event, TextLine):
            reducer.text(event)
        elif isinstance(event, Traceback):
            reducer.traceback(event)
        else:
            reducer.arguments(event)
    diagnoses, consequences = reducer.finish()
    return Reduction(
        diagnoses=tuple(diagnoses),
        consequences=tuple(consequences),
        facts=reducer.facts,
        lines=count,
        process_lines=process,
        server_lines=server,
        suppressed=reducer.suppressed,
        begin=begin,
        end=end,
        stopped=reducer.stopped,
        ready=reducer.ready,
        decode=reducer.decode(),
    )
