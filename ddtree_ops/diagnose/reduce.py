"""From events to the one cause: the deepest cause of the earliest failure, voted over ranks.

What only frames a failure (``Scheduler hit an exception``) or follows it (SIGQUIT, lost peers, systemd's
``code=killed``) is a consequence, never the cause; it becomes the finding only where nothing deeper was seen, and
never after a planned stop. Memory is bounded: a failure seen a million times is one group with a count.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ddtree_ops.diagnose.events import (
    ExceptionBlock,
    Frame,
    PhaseKind,
    ServerArgs,
    TextLine,
    Traceback,
    parse_command,
    parse_events,
    parse_phase,
    parse_prefix,
    phase_of,
    root_block,
)
from ddtree_ops.diagnose.explain import explain_sizes, tail
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.library import Library, Match, Severity, Where
from ddtree_ops.diagnose.lines import LogLine, Source, seconds_of
from ddtree_ops.diagnose.tracebacks import MARK, Kind, lone_exception
from ddtree_ops.secret import redact

__all__ = ["Diagnosis", "EvidenceLine", "Reduction", "fingerprint", "reduce_lines"]

_EVIDENCE = 6
_GROUPS = 256
_FIRST_KEPT = 32
_ANSWERS = 512
_WINDOW_S = 10.0
_KERNEL_WINDOW_S = 60.0
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
class Reduction:
    """What was found in a run of lines; diagnoses root cause first.

    :param server_lines: at least one line is unmistakably an SGLang server's.
    :param loading: the last life of the server began to load, and no line shows that it came to an end of that: it was
        not ready, did no work, answered nothing and was not stopped.
    :param step: the last step of that load that was seen; empty where none was.
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
    loading: bool = False
    step: str = ""


_NORMAL: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "X"),
    (re.compile(r"0x[0-9a-fA-F]+"), "X"),
    (re.compile(r"\b(?:TP|DP|PP|EP)\d+\b"), "R"),
    (re.compile(r"\[rank\d+\]:?"), "R"),
    (re.compile(r"(?<![\w/])(?:[A-Za-z]:)?(?:~|\.{1,2})?(?:/[\w.@+~:=-]+)+/?"), "P"),
    (re.compile(r"\b[\w-]{1,80}\.(?:py|so|json|cu|cuh|cpp|safetensors|bin|pt|yaml)(?:\.\d+)*\b"), "P"),
    (re.compile(r"\btmp\w{6,10}\b"), "X"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,64}\b"), "X"),
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d\S*)?"), "N"),
    (re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?"), "N"),
    (re.compile(r"\bN ?[KMGT]?i?B\b"), "N B"),
    (re.compile(r"N(?: ?[x,] ?N)+,?"), "N"),
    (re.compile(r"\s+"), " "),
)
_GENERATED = re.compile(r"(?:tmp\w{6,10}|c[0-9a-z]{40,60}|[0-9a-f]{16,64}|<[^>]*>)")


@lru_cache(maxsize=2048)
def fingerprint(kind: str, message: str, frame: Frame | None) -> str:
    """12 hex digits of what stays the same: exception, message without numbers and paths, function it came from.

    Left out: line numbers, addresses, ranks, sizes, shapes, paths, process ids, ids, dates, temporary names, and all but
    the message's first line that is not empty.
    """
    text = message.lstrip()[:400].partition("\n")[0]
    for pattern, replacement in _NORMAL:
        text = pattern.sub(replacement, text)
    place = ""
    if frame is not None:
        file = frame.file.rpartition("/")[2]
        place = f"{'P' if _GENERATED.match(file) else file}:{frame.function}"
    return hashlib.sha256(f"{kind}\n{text.strip()}\n{place}".encode("utf-8", "replace")).hexdigest()[:12]


def _sglang_frame(frames: Sequence[Frame]) -> Frame | None:
    return next((frame for frame in reversed(frames) if frame.engine), frames[-1] if frames else None)


def _clip(text: str, limit: int = _TEXT) -> str:
    text = redact(text[: 2 * limit])
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _natural(text: str) -> list[tuple[int, str]]:
    return [
        (int(part[:9]), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part
    ]


@dataclass
class _Group:
    """All sightings of one finding in one life of the server.

    :param last: time of the latest sighting.
    :param stage: what the server was doing, in words.
    :param said: exception and message, to know a repetition by.
    :param lived: the server was seen to go on after it.
    :param late: the text is CUDA's, which reports late.
    :param caught: a serving process logged it with a message of its own, so it went on unless something tells of an end.
    :param foreign: nothing about it says that it is an SGLang server's: it counts only among lines of one.
    :param text: what was matched, with ``frames``; ``asked`` are the facts it was explained with.
    """

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
    stage: str
    where: Source
    traceback: tuple[str, ...] = ()
    kind: Kind | None = None
    said: str = ""
    late: bool = False
    doubtful: bool = False
    foreign: bool = False
    caught: bool = False
    lived: bool = False
    last: str = ""
    text: str = ""
    frames: tuple[Frame, ...] = ()
    asked: ServiceFacts | None = None
    count: int = 0
    ranks: set[str] = field(default_factory=set)
    voters: set[str] = field(default_factory=set)
    evidence: list[EvidenceLine] = field(default_factory=list)

    def seen(self, when: str, rank: str, voter: str, evidence: Sequence[EvidenceLine]) -> None:
        self.count += 1
        self.last = when or self.last
        if rank and len(self.ranks) < 4096:
            self.ranks.add(rank)
        if len(self.voters) < 4096:
            self.voters.add(rank or voter)
        room = _EVIDENCE - len(self.evidence)
        if room > 0:
            self.evidence.extend(evidence[:room])

    def absorb(self, other: _Group) -> None:
        """Count another group of the same finding in."""
        if other.traceback or not self.traceback:
            self.count += other.count
        self.ranks |= other.ranks
        self.voters |= other.voters
        self.late = self.late or other.late
        self.evidence = [*self.evidence, *other.evidence][:_EVIDENCE]
        if other.number < self.number:
            self.number, self.first = other.number, other.first or self.first

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
class _Assertion:
    """An assertion of a CUDA kernel, seen once for each thread that failed it."""

    line: EvidenceLine
    text: str
    when: str
    rank: str
    count: int = 1


_WHERE: dict[Source, Where] = {"process": "log", "systemd": "systemd", "kernel": "kernel"}
_QUIET = frozenset({"KeyboardInterrupt", "SystemExit", "CancelledError", "GeneratorExit"})
_PAYLOAD = re.compile(
    r"(?:Receive|Receive OpenAI|Finish): obj=|(?:GenerateReq|EmbeddingReq|ChatCompletionReq|CompletionReq)\w{0,10}\(|warm-?up[^:=]{0,40}?(?:request|payload|data|body|prompt|text)\w{0,4} ?[:=] ?[({\[]"
    r"|\"event\": \"request\.|messages=\[\{|\bprompt=['\"]"
)
"""Where in a line begins what users wrote (``--log-requests``, warm-up requests): that is no evidence."""
_SUPPRESSED = re.compile(r"Suppressed (\d{1,9}) messages from")
_STOPPING = re.compile(r"Stopping \S")
_ALIVE = re.compile(r"(?:Prefill batch|Decode batch)|HTTP/1\.[01]\" 2\d\d")
_CUDA = re.compile(
    r"CUDA error\b|CUDA driver error|device-side assert|illegal memory access|CUDA_ERROR_|unspecified launch failure|cudaError[A-Z]"
)
_LATE = re.compile(r"\blate\b|asynchron")
_ASSERTION = re.compile(
    r"(\S{1,300}\.(?:cuh?|h|cpp|hpp)):(\d{1,7}): .{0,300}?block: \[[\d,]{1,40}\], thread: \[[\d,]{1,40}\],? Assertion [`'\"](.{1,400}?)[`'\"] failed"
)
_BLOCKING = re.compile(r"CUDA_LAUNCH_BLOCKING['\"]?\s*[=:]\s*['\"]?1\b")
_XID = re.compile(r"Xid \([^)]{0,40}\): (\d{1,4})")
_PARTS = re.compile(
    r"\b(?:sglang|sgl_kernel|flashinfer|torch|triton|deep_gemm|deep_ep|xgrammar|transformers|safetensors|zmq|srt|managers"
    r"|(?:scheduler|model_runner|tp_worker|server_args|launch_server)\.py)\b"
)
"""In a path or the name of an exception: it is of what an SGLang server is made of."""
_CAUGHT = re.compile(
    r"\b(?:[Ee]rror|[Ff]ail\w*|[Ee]xception|[Uu]nable|[Cc]ould not|[Cc]annot|[Ss]kipp\w+|[Ii]gnor\w+)\b"
)
_WRAPPED = re.compile(r"hit an exception|Exception in thread|Process \S+:")
_QUOTED = re.compile(
    r"\s*(?:[-*+#|] |\||\d+\. .*`|[\w.{}-]{1,40} ?[=:(\[]{1,2} ?[\[{(]*[rf]{0,2}[\"'`]|[\[({]*[rf]{0,2}[\"'`]|raise |return |assert |logger\.|[^`]*`[^`]*`)"
)
"""How a line begins that shows a message rather than being it: source, YAML, Markdown."""
_FOREIGN: dict[Source, re.Pattern[str]] = {
    "process": _QUOTED,
    "kernel": re.compile(r"(?:traps: )?python[\w.]*\[\d+\]"),
    "systemd": re.compile(r"(?!)"),
}
_DIGITS = re.compile(r"\d+")
_OF_PROGRAM = frozenset({13, 31, 43, 45})
"""Xids that a program's own fault causes: its exception says more."""
_SERVES = re.compile(r"(?:Prefill batch|Decode batch)|\"POST \S+ HTTP/1\.[01]\" 2\d\d")


_OF_KERNEL = re.compile(
    r"(?:kernel: )?(?:\[[^\]]{1,20}\] )?(?:Memory cgroup out|Out) of memory: Kill(?:ed)? process \d"
)
"""What the kernel says of a process that it ended, in a paste that lost the head of the line."""
_COMMAND_LINES = 60
_RESTART = 3
"""Mark of a life after which another start was announced."""


class _Reducer:
    def __init__(self, library: Library, facts: ServiceFacts) -> None:
        self.library = library
        self.given = facts
        self.facts = facts
        self.groups: dict[tuple[int, str, str], _Group] = {}
        self.ordered = 0
        self.doubtful: list[_Group] = []
        self.assertions: dict[int, dict[str, _Assertion]] = {}
        self.matched: dict[tuple[ExceptionBlock, ...], tuple[Match, ExceptionBlock] | None] = {}
        self.asked = facts
        self.answers: dict[tuple[str, Where], Match | None] = {}
        self.starts: list[int] = []
        self.stop_at = 0
        self.mark = -1
        self.starting = False
        self.stopping = False
        self.stopped = False
        self.ready = False
        self.loading = False
        self.typed: list[str] = []
        self.typed_at = 0
        self.blocking = False
        self.crashed = False
        self.kernel_lines = 0
        self.step = ""
        self.suppressed = 0

    def lookup(self, text: str, where: Where) -> Match | None:
        """The signature of a single line; ranks say the same, so answers are kept for a while."""
        if self.facts is not self.asked:
            if self.facts != self.asked:
                self.answers.clear()
                self.matched.clear()
            self.asked = self.facts
        key = (text, where)
        if key in self.answers:
            return self.answers[key]
        if len(self.answers) >= _ANSWERS:
            self.answers.clear()
        found = self.library.match(text, where, self.facts)
        if len(text) <= 1000:
            self.answers[key] = found
        return found

    @property
    def life(self) -> int:
        """How many starts were seen before the present one."""
        return len(self.starts)

    def add(
        self,
        name: str,
        key: str,
        make: Mapping[str, Any],
        number: int,
        when: str,
        rank: str,
        voter: str,
        evidence: Sequence[EvidenceLine],
    ) -> _Group:
        life = bisect_right(self.starts, number)
        full = (life, name, key)
        group = self.groups.get(full)
        if group is None:
            if len(self.groups) >= _GROUPS:
                self._evict()
            present = life == self.life
            group = _Group(
                signature=name,
                print=key,
                number=number,
                first=when,
                life=life,
                order=self.ordered,
                stopping=present and self.stopping and number >= self.stop_at,
                stage=self._stage() if present else "",
                **make,
            )
            self.ordered += 1
            self.groups[full] = group
        elif number < group.number:
            group.number, group.first = number, when
        group.seen(when, rank, voter, evidence)
        return group

    def _evict(self) -> None:
        """Room for new findings: the first ones and the frequent ones stay, of the rest those of this life last."""
        by_worth = sorted(
            self.groups.items(),
            key=lambda item: (item[1].count > 1, item[1].life == self.life, item[1].count, -item[1].order),
        )
        spare = [key for key, group in by_worth if group.order >= _FIRST_KEPT and group.role == "cause"]
        spare = spare or [key for key, group in by_worth if group.order >= _FIRST_KEPT]
        for key in spare[: _GROUPS // 2]:
            del self.groups[key]
        self.doubtful = [
            group
            for group in self.doubtful
            if self.groups.get((group.life, group.signature, group.print)) is group
        ]

    def _stage(self) -> str:
        if self.stopping:
            return "after it was told to stop"
        if self.ready:
            return "after it had said that it was ready"
        return f"before it was ready (last step seen: {self.step.rstrip('.')})" if self.step else ""

    def _begins(self, mark: int, number: int) -> None:
        """A sign of a start was read: 0 of the unit, 1 the arguments, 2 the HTTP server. An earlier sign is a new start."""
        if mark <= self.mark:
            self._reborn(number)
        self.mark = mark

    def _reborn(self, number: int) -> None:
        self.starts.append(number)
        self.stopping = self.stopped = self.ready = self.loading = False
        self.step = ""

    def _stops(self, number: int) -> None:
        if not self.stopping:
            self.stop_at = number
        self.stopping = self.stopped = True
        self.loading = False

    def known(
        self,
        match: Match,
        number: int,
        when: str,
        rank: str,
        voter: str,
        evidence: Sequence[EvidenceLine],
        *,
        where: Source = "process",
        text: str = "",
        frame: Frame | None = None,
        frames: tuple[Frame, ...] = (),
        traceback: tuple[str, ...] = (),
        kind: Kind | None = None,
        doubtful: bool = False,
        foreign: bool = False,
    ) -> None:
        signature = match.signature
        if signature.severity == "benign":
            return
        make = {
            "severity": signature.severity,
            "title": signature.title,
            "explanation": redact(match.explanation),
            "remedy": redact(match.remedy),
            "role": "consequence" if kind == "signal" else signature.role,
            "alone": signature.alone or kind == "signal",
            "traceback": traceback,
            "where": where,
            "kind": kind,
            "said": text[:300],
            "text": text[:8000],
            "frames": frames,
            "asked": self.facts,
            "late": signature.severity == "fatal" and _CUDA.search(text) is not None,
        }
        key = fingerprint(signature.id, "", frame)
        group = self.add(signature.id, key, make, number, when, rank, voter, evidence)
        group.foreign = foreign and (group.foreign or group.count == 1)
        doubtful = where == "kernel" or (doubtful and group.role == "cause")
        if not doubtful:
            group.lived = group.doubtful = False
        elif group.severity == "fatal" and (group.count == 1 or group.lived) and len(self.doubtful) < _GROUPS:
            group.lived, group.doubtful = False, True
            self.doubtful.append(group)

    def text(self, event: TextLine) -> None:
        line, body = event.line, event.body
        source, asserted = line.source, False
        if source == "process" and "Kill" in body and _OF_KERNEL.match(body):
            source = "kernel"
        if source == "process":
            self.server(event)
            if self.typed or "launch_server" in body or "sglang serve" in body:
                self.command(body, line.number)
            if "CUDA_LAUNCH_BLOCKING" in body and _BLOCKING.search(body) and "onsider passing" not in body:
                self.blocking = True
            if "ssertion" in body and (found := _ASSERTION.search(body)) is not None:
                asserted = not found.start()
                self.assertion(event, found)
        elif source == "systemd":
            self.manager(body, line.number)
        else:
            self.kernel_lines += 1
        if "Suppressed " in body and (lost := _SUPPRESSED.search(body)):
            self.suppressed += int(lost[1])
        match = self.lookup(body, _WHERE[source])
        lone = lone_exception(body) if source == "process" else None
        if match is None and lone is not None:
            match = self.library.match(f"{lone[0]}: {lone[1]}", "traceback", self.facts)
        if match is None or (match.signature.severity == "request" and match.signature.role == "wrapper"):
            return
        evidence = (EvidenceLine(line.number, _clip(line.text)),)
        self.known(
            match, line.number, event.time, event.rank, _voter(line.pid), evidence, where=source, text=body,
            foreign=lone is None and not asserted and _FOREIGN[source].match(body) is not None,
        )  # fmt: skip

    def command(self, body: str, number: int) -> None:
        """A line of a command that starts a server, as people paste it beside a log; it may go on in the next line."""
        text = body.rstrip()
        self.typed.append(text.removesuffix("\\"))
        if text.endswith("\\") and len(self.typed) < _COMMAND_LINES:
            return
        values = parse_command(" ".join(self.typed))
        self.typed.clear()
        if values:
            known = self.facts
            self.facts = known.learn_arguments(values)
            if self.facts != known:
                self.typed_at = number

    def manager(self, body: str, number: int) -> None:
        """A line of systemd about the unit."""
        if _STOPPING.match(body):
            self._stops(number)
        elif body.startswith("Starting "):
            self._begins(0, number)
            self.starting = True
        elif body.startswith("Started "):
            if self.starting:
                self.starting = False
            else:
                self._begins(0, number)
        elif "Scheduled restart job" in body:
            self.mark, self.starting = _RESTART, False

    def assertion(self, event: TextLine, found: re.Match[str]) -> None:
        """A kernel's assertion: better evidence than the frame of the exception that comes later."""
        known = self.assertions.setdefault(self.life, {})
        if len(self.assertions) > _GROUPS:
            del self.assertions[next(iter(self.assertions))]
        text = f"{found[1].rpartition('/')[2]}:{found[2]}: Assertion `{found[3]}` failed"
        if text in known:
            known[text].count += 1
        elif len(known) < 16:
            line = EvidenceLine(event.line.number, _clip(event.line.text))
            known[text] = _Assertion(line, text, event.time, event.rank)

    def server(self, event: TextLine) -> None:
        body = event.body
        if self.loading and _ALIVE.search(body):
            self.loading = False
        if self.doubtful and _ALIVE.search(body):
            number, serves = event.line.number, _SERVES.search(body) is not None
            for group in self.doubtful:
                sure = serves or group.signature == "unknown"
                if group.life == self.life and group.number < number and group.doubtful and sure:
                    group.lived = True
            self.doubtful = [group for group in self.doubtful if group.doubtful and not group.lived]
        phase = phase_of(body)
        if phase is None:
            return
        kind = phase.kind
        if kind is PhaseKind.READY:
            self.ready, self.loading = True, False
        elif kind is PhaseKind.STOPPING:
            self._stops(event.line.number)
        elif kind is PhaseKind.STARTING_HTTP:
            self._begins(2, event.line.number)
        elif kind is PhaseKind.LIMITS:
            self.facts = self.facts.learn_limits(phase.fields)
        elif kind is PhaseKind.DRAFT_READY:
            size = re.search(r"block_size=(\d{1,4})", body)
            if size:
                self.facts = self.facts.learn({"block_size": int(size[1])})
        if kind not in (PhaseKind.FAILED, PhaseKind.STOPPING, PhaseKind.READY) and not self.ready:
            self.step = phase.message[:120]
            self.loading = self.loading or not self.stopping

    def arguments(self, event: ServerArgs) -> None:
        if not event.start:
            self.facts = self.facts.learn_arguments(event.values)
            return
        failed = any(
            group.life == self.life and group.severity == "fatal" and not group.doubtful
            for group in self.groups.values()
        )
        if self.mark >= 1 or (self.mark < 0 and (failed or self.stopped)):
            self._reborn(event.line.number)
        self.mark = 1
        self.stopping = self.stopped = self.ready = False
        self.loading = True
        self.facts = self.given.learn_arguments(event.values)

    def traceback(self, record: Traceback) -> None:
        self.crashed = self.crashed or any(
            "sglang" in frame.file for block in record.exceptions for frame in block.frames
        )
        if record.kind == "threads":
            return
        fatal = record.kind in ("native", "signal")
        voter = record.voter or _voter(record.pid)
        for text in (record.header, record.before):
            match = self.lookup(text, "log") if text else None
            if match is None:
                continue
            if match.signature.severity == "benign":
                return
            if match.signature.severity == "request":
                if text is record.header or match.signature.role == "wrapper":
                    self.request(record, match)
                return
            if match.signature.severity == "degraded" and text is record.before:
                return
            evidence = (EvidenceLine(record.number, _clip(text)),)
            self.known(match, record.number, record.time, record.rank, voter, evidence)
            if match.signature.severity == "degraded":
                return
            fatal = fatal or match.signature.role == "wrapper"
        root = root_block(record.exceptions)
        if root is None:
            return
        found = self._matched(record, root)
        if found is not None:
            match, block = found
            self.known(
                match,
                block.number or record.number,
                record.time,
                record.rank,
                voter,
                _evidence(block, record),
                text=block.text,
                frame=_sglang_frame(block.frames) if record.sure else None,
                frames=block.frames,
                traceback=_reduced(block, record.sure),
                kind=record.kind,
                doubtful=not fatal,
            )
        elif root.type.rpartition(".")[2] not in _QUIET:
            self.unknown(record, root, fatal, voter)

    def _matched(self, record: Traceback, root: ExceptionBlock) -> tuple[Match, ExceptionBlock] | None:
        """The signature of a chain: that of its root, else of another exception in it; causes before consequences.

        An exception that repeats the root's message and adds where it happened knows better than the root; what it
        repeats was raised in the root's frames.
        """
        if record.exceptions in self.matched:
            return self.matched[record.exceptions]
        best: tuple[Match, ExceptionBlock] | None = None
        for block in [root, *(item for item in record.exceptions if item is not root)]:
            again = best is not None and _repeats(block, best[1])
            match = self._of_block(record, block, root.frames if again else ())
            if match is None or (match.signature.severity == "benign" and block is not root):
                continue
            if best is None:
                best = match, block
                if match.signature.severity == "benign":
                    break
            elif match.signature.role != "cause":
                continue
            elif best[0].signature.role != "cause" or again:
                best = match, block
        if len(self.matched) >= 256:
            self.matched.clear()
        self.matched[record.exceptions] = best
        return best

    def _of_block(
        self, record: Traceback, block: ExceptionBlock, inner: tuple[Frame, ...] = ()
    ) -> Match | None:
        frames = inner + block.frames
        match = self.library.match(block.text, "traceback", self.facts, frames)
        if match is not None:
            return match
        lines = (
            [block.text.partition("\n")[0]]
            if record.kind == "python"
            else [block.text, *block.message.split("\n")[:8]]
        )
        for text in [*lines, *block.message.split("\n")[1:40]]:
            match = self.library.match(text, "log", self.facts, frames) if text else None
            if match is not None and match.signature.severity != "benign":
                return match
        return None

    def request(self, record: Traceback, match: Match) -> None:
        block = root_block(record.exceptions)
        if block is None or not block.type:
            return
        make = {
            "severity": "request",
            "title": match.signature.title,
            "explanation": f"{match.explanation} {_clip(block.text, 300)}",
            "remedy": match.remedy,
            "role": "cause",
            "alone": False,
            "traceback": _reduced(block),
            "where": "process",
        }
        key = fingerprint(block.type, block.message, _sglang_frame(block.frames))
        self.add(
            match.signature.id,
            key,
            make,
            record.number,
            record.time,
            record.rank,
            record.voter or _voter(record.pid),
            _evidence(block, record),
        )

    def unknown(self, record: Traceback, block: ExceptionBlock, fatal: bool, voter: str) -> None:
        frame = _sglang_frame(block.frames) if record.sure else None
        name = block.type or "a traceback that is cut off before its exception"
        if record.kind == "build":
            name = "a compiler's error"
        if name == "Fatal Python error":
            name = block.message.partition("\n")[0]
        where = f", raised in {_place(frame)}" if frame else ""
        if not record.sure:
            where = " (the lines of several ranks are mixed so that its place cannot be told)"
        said = _clip(block.line or name, 300).rstrip(". ")
        remedy = (
            "keep the journal of this invocation; search the message and the frame in the issues of sglang"
        )
        seen = [item.file for one in record.exceptions for item in one.frames]
        if not block.type:
            last = f" after its frame {_place(block.frames[-1])}" if block.frames and record.sure else ""
            text = (
                f"The traceback is cut off{last}: the line that names the error is not among what was read."
            )
            remedy = "paste what follows: the last line of the traceback has the error"
        elif record.kind == "python" and seen and not any(_PARTS.search(file) for file in seen):
            text = f"{said}{where}: no frame of the server is in it, so this is the script's own error. "
            remedy = (
                f"look at {_place(frame) if frame else 'that script'}; what the server itself says is in its own journal "
                f"(ddtree-ops diagnose {self.facts.host or 'HOST'})"
            )
        else:
            text = f"{said}{where}: no signature explains it. "
            if record.kind == "build":
                remedy = (
                    "read the compiler's first error, and look for the command and the header that it names"
                )
        text += explain_sizes(block.text, self.facts)
        make = {
            "severity": "fatal",
            "title": f"unknown failure: {name.rpartition('.')[2] if record.kind in ('python', 'line') else name}"[
                :200
            ],
            "explanation": text.strip(),
            "remedy": remedy,
            "role": "consequence" if record.kind == "signal" else "cause",
            "alone": record.kind == "signal",
            "traceback": _reduced(block, record.sure),
            "where": "process",
            "kind": record.kind,
            "said": block.text[:300],
            "text": block.text[:8000],
            "asked": self.facts,
            "late": _CUDA.search(block.text) is not None,
            "foreign": not _ours(record, block),
            "caught": self.ready and not fatal and _CAUGHT.search(record.header or record.before) is not None,
        }
        key = fingerprint(block.type, block.message, frame)
        number = block.number or record.number
        group = self.add(
            "unknown", key, make, number, record.time, record.rank, voter, _evidence(block, record)
        )
        if fatal:
            group.doubtful = group.lived = False
            self.doubtful = [item for item in self.doubtful if item is not group]
        elif group.count == 1 and len(self.doubtful) < _GROUPS:
            group.doubtful = True
            self.doubtful.append(group)
        elif group.lived:
            group.lived = False
            self.doubtful.append(group)

    def finish(self, server: bool = True) -> tuple[list[Diagnosis], list[Diagnosis]]:
        """Root causes, the newest failed life's first, then notes; and what followed from them.

        :param server: some line or frame is an SGLang server's; else what may be anybody's is left out.
        """
        if not server:
            self.groups = {
                key: group
                for key, group in self.groups.items()
                if not group.foreign or group.signature == "unknown"
            }
            for group in self.groups.values():
                if group.foreign:
                    group.severity = "degraded"
        roots: list[_Group] = []
        others: list[_Group] = []
        notes: list[_Group] = []
        lives = {group.life for group in self.groups.values()} | set(self.assertions)
        for life in sorted(lives, reverse=True):
            groups = sorted(
                (g for g in self.groups.values() if g.life == life), key=lambda g: (g.number, g.order)
            )
            groups = self._sound(groups, life)
            root = self._root(groups)
            notes += [g for g in groups if g.severity != "fatal"]
            if root is not None:
                roots.append(root)
            others += [g for g in groups if g.severity == "fatal" and g is not root]
        for group in roots:
            if group.number < self.typed_at:
                self._again(group)
            self._complete(group)
        merged = _merged(roots)
        self._earlier(merged)
        notes.sort(key=lambda g: (g.number, g.order))
        others.sort(key=lambda g: (-g.life, g.number, g.order))
        return [group.diagnosis() for group in [*merged, *_merged(notes)]], [
            group.diagnosis() for group in _merged(others)
        ]

    def _sound(self, groups: list[_Group], life: int) -> list[_Group]:
        """The findings of a life as they stand when all was read."""
        ends = [g for g in groups if g.severity == "fatal" and g.where != "kernel" and g.role != "cause"]
        for group in groups:
            if (group.lived and not any(_near(group.last, end.first) for end in ends)) or (
                group.caught and group.severity == "fatal" and not any(g.number >= group.number for g in ends)
            ):
                group.severity = "degraded"
        said = {g.said for g in groups if g.kind not in (None, "line")}
        groups = [
            g
            for g in groups
            if not (
                g.kind == "line" and g.signature == "unknown" and (g.severity == "degraded" or g.said in said)
            )
        ]
        groups = _folded(groups)
        found = self.assertions.get(life, {})
        first = next(iter(found.values()), None)
        told = first is not None and any(
            g.late or any(line.line == first.line.line for line in g.evidence)
            for g in groups
            if g.severity == "fatal"
        )
        if first is not None and not told:
            group = _Group(
                signature="unknown",
                severity="fatal",
                title="an assertion in a CUDA kernel failed",
                explanation=f"A CUDA kernel found a condition broken: {first.text}: no signature explains it.",
                remedy="look up the kernel's line in the source; run once with CUDA_LAUNCH_BLOCKING=1",
                print=fingerprint("device assertion", first.text, None),
                number=first.line.line,
                first=first.when,
                life=life,
                role="cause",
                alone=False,
                order=self.ordered,
                stopping=False,
                stage="",
                where="process",
                evidence=[first.line],
                count=first.count,
                ranks={first.rank} if first.rank else set(),
            )
            groups = sorted([*groups, group], key=lambda g: (g.number, g.order))
        return groups

    def _root(self, groups: Sequence[_Group]) -> _Group | None:
        fatal = [g for g in groups if g.severity == "fatal"]
        causes = [g for g in fatal if g.role == "cause" and not (g.stopping and g.signature == "unknown")]
        kernel = [g for g in causes if g.where == "kernel"]
        causes = [g for g in causes if g.where != "kernel"]
        ends = [g for g in fatal if g.where != "kernel" and not g.stopping]
        if kernel and ends:
            for group in kernel:
                if not _leads(group, ends[0]):
                    group.severity = "degraded"
            kernel = [g for g in kernel if g.severity == "fatal" and not (causes and _by_program(g))]
        if kernel:
            return kernel[0]
        root = _vote(causes)
        if root is None:
            rest = [g for g in fatal if g.alone and not g.stopping]
            named = [g for g in rest if g.role == "wrapper" and g.traceback]
            root = next(iter([*named, *rest]), None)
        return root

    def _complete(self, group: _Group) -> None:
        """Say what only the whole life tells."""
        more = []
        if group.role != "cause":
            if group.stage and group.where == "process":
                more.append(f"It happened {group.stage}.")
            if group.kind is None and group.where == "process":
                more.append(
                    "The kernel's lines were read too and name no reason."
                    if self.kernel_lines
                    else "No line of the kernel is among what was read."
                )
        if group.late:
            if self.blocking:
                more.append("CUDA_LAUNCH_BLOCKING=1 was set, so the frame is that of the faulty call.")
            elif not _LATE.search(group.explanation):
                more.append("CUDA reports errors late: the frame may be after the faulty call.")
            found = self.assertions.get(group.life)
            if found:
                first = next(iter(found.values()))
                if first.text not in group.explanation:
                    more.append(f"The kernel's own line is the better evidence: {first.text}.")
                kept = [line for line in group.evidence if line.line != first.line.line]
                group.evidence = [first.line, *kept][:_EVIDENCE]
        if more:
            group.explanation = " ".join([group.explanation.rstrip(), *more])

    def _again(self, group: _Group) -> None:
        """Explain with what a command told that stands below the failure."""
        if group.asked is None:
            return
        if group.signature == "unknown":
            before = explain_sizes(group.text, group.asked)
            if before and group.explanation.endswith(before):
                group.explanation = group.explanation.removesuffix(before) + explain_sizes(
                    group.text, self.facts
                )
            return
        places: tuple[Where, ...] = ("kernel",) if group.where == "kernel" else ("traceback", "log")
        for where in places:
            match = self.library.match(group.text, where, self.facts, group.frames)
            if match is not None and match.signature.id == group.signature:
                group.explanation, group.remedy = redact(match.explanation), redact(match.remedy)
                return

    def _earlier(self, roots: Sequence[_Group]) -> None:
        """Name in the newest failure what earlier starts failed of."""
        if len(roots) < 2:
            return
        names = list(dict.fromkeys(_called(group) for group in roots[1:]))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        roots[
            0
        ].explanation = (
            f"{roots[0].explanation.rstrip()} Earlier starts in these lines failed otherwise: {shown}."
        )


def _called(group: _Group) -> str:
    return group.signature if group.signature != "unknown" else group.title.removeprefix("unknown failure: ")


def _repeats(block: ExceptionBlock, inner: ExceptionBlock) -> bool:
    said = inner.message.partition("\n")[0][:120]
    if len(said) < 12:
        return False
    return said in block.message or _DIGITS.sub("0", said)[:100] in _DIGITS.sub("0", block.message[:2000])


def _voter(pid: int | None) -> str:
    return f"pid {pid}" if pid is not None else ""


def _place(frame: Frame) -> str:
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.function or 'the module'} ({tail(frame.file)}{line})" if frame.file else frame.function


def _ours(record: Traceback, block: ExceptionBlock) -> bool:
    """Whether an exception no signature knows can be that of an SGLang server, going by itself alone."""
    if record.kind not in ("python", "line"):
        return True
    if _PARTS.search(block.type) or _CUDA.search(block.text) or "tensor" in block.text:
        return True
    if _WRAPPED.search(record.header):
        return True
    return any(_PARTS.search(frame.file) for item in record.exceptions for frame in item.frames)


def _near(one: str, other: str) -> bool:
    a, b = seconds_of(one), seconds_of(other)
    return a is not None and b is not None and abs(a - b) <= _WINDOW_S


def _leads(group: _Group, end: _Group) -> bool:
    """Whether what the kernel reported came just before a failure of the server."""
    first, last, at = seconds_of(group.first), seconds_of(group.last), seconds_of(end.first)
    if first is None or last is None or at is None:
        return group.number <= end.number
    return first <= at + _WINDOW_S and last >= at - _KERNEL_WINDOW_S


def _by_program(group: _Group) -> bool:
    numbers = [int(found[1]) for line in group.evidence if (found := _XID.search(line.text))]
    return bool(numbers) and all(number in _OF_PROGRAM for number in numbers)


def _folded(groups: Sequence[_Group]) -> list[_Group]:
    """One group a known fatal signature; the sighting with a traceback speaks for the others."""
    chosen: dict[str, _Group] = {}
    kept: list[_Group] = []
    for group in sorted(groups, key=lambda g: (not g.traceback, -len(g.voters), g.order)):
        if group.signature == "unknown" or group.severity != "fatal" or group.where == "kernel":
            kept.append(group)
            continue
        first = chosen.setdefault(group.signature, group)
        if first is group:
            kept.append(group)
        else:
            first.absorb(group)
    return sorted(kept, key=lambda g: (g.number, g.order))


def _vote(causes: Sequence[_Group]) -> _Group | None:
    """The cause most ranks report among those of the first failure; the earliest of several.

    A native crash (C++, the interpreter) follows from an exception before it, and explains those after it unless a
    signature knows better.
    """
    if not causes:
        return None
    start = seconds_of(causes[0].first)
    times = [(group, seconds_of(group.first)) for group in causes]
    near = [g for g, at in times if start is None or at is None or abs(at - start) <= _WINDOW_S]
    if near[0].kind == "native" and not any(g.signature != "unknown" for g in near):
        return near[0]
    python = [g for g in near if g.kind != "native" or g.signature != "unknown"]
    return max(python or near, key=lambda group: (len(group.voters), -group.number, -group.order))


def _merged(groups: Sequence[_Group]) -> list[_Group]:
    """One group a signature and fingerprint, counts of several lives added up, order kept."""
    kept: dict[tuple[str, str], _Group] = {}
    for group in groups:
        first = kept.setdefault((group.signature, group.print), group)
        if first is not group:
            first.count += group.count
            first.ranks |= group.ranks
            if group.number < first.number:
                first.number, first.first = group.number, group.first
    return list(kept.values())


def _evidence(block: ExceptionBlock, record: Traceback) -> tuple[EvidenceLine, ...]:
    """The lines of an exception as they were printed; the last frame where the traceback was cut off before it."""
    if block.printed:
        return tuple(EvidenceLine(number, _clip(text)) for number, text in block.printed)
    number, text = block.number or record.number, block.line
    if not text and block.frames and block.number:
        frame = block.frames[-1]
        text = f'File "{frame.file}", line {frame.line}' + (
            f", in {frame.function}" if frame.function else ""
        )
    text = text or record.header or MARK
    return (EvidenceLine(number, _clip(text)),)


def _reduced(block: ExceptionBlock, sure: bool = True) -> tuple[str, ...]:
    frames: list[Frame] = []
    inner = _sglang_frame(block.frames) if sure else None
    if inner is not None:
        frames.append(inner)
        if block.frames[-1] != inner:
            frames.append(block.frames[-1])
    lines = []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"    {frame.code}")
    return tuple(_clip(line) for line in [*lines, block.line or "(cut off)"])


def reduce_lines(lines: Iterable[LogLine], facts: ServiceFacts, library: Library) -> Reduction:
    """Read lines once and reduce them; memory does not grow with their number."""
    reducer = _Reducer(library, facts)
    count = process = 0
    begin = end = ""
    server = False

    def counted() -> Iterator[LogLine]:
        nonlocal count, process, begin, end, server
        for line in lines:
            count += 1
            text = line.text
            own = line.source == "process"
            process += own
            if not server and own:
                server = parse_prefix(text) is not None or parse_phase(text) is not None
            when = line.time
            if not when and text[:3] == "[20":
                when = text[1:20]
            if when:
                end = when
                if not begin:
                    begin = when
            if (
                own
                and (
                    "obj=" in text
                    or "Req" in text
                    or "warm" in text
                    or '"request.' in text
                    or "messages=[" in text
                    or "prompt=" in text
                )
                and "ServerArgs(" not in text
                and (found := _PAYLOAD.search(text)) is not None
            ):
                line = replace(line, text=text[: found.start()])
            yield line

    for event in parse_events(counted()):
        if isinstance(event, TextLine):
            reducer.text(event)
        elif isinstance(event, Traceback):
            reducer.traceback(event)
        else:
            reducer.arguments(event)
    diagnoses, consequences = reducer.finish(server or reducer.crashed)
    return Reduction(
        diagnoses=tuple(diagnoses),
        consequences=tuple(consequences),
        facts=reducer.facts,
        lines=count,
        process_lines=process,
        server_lines=server or reducer.crashed,
        suppressed=reducer.suppressed,
        begin=begin,
        end=end,
        stopped=reducer.stopped,
        ready=reducer.ready,
        loading=reducer.loading,
        step=reducer.step,
    )
