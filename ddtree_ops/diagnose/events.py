"""SGLang's output as events. Pure: lines in, events out, nothing is judged here.

A line carries a prefix ``[2026-01-29 00:24:41 DP0 TP3 EP3] `` with time and rank. A traceback is one record over
many lines of which only the first is prefixed; eight ranks print theirs at the same time. In a journal the PID
tells them apart; in a plain file the best guess is made.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ddtree_ops.diagnose.lines import LogLine
from ddtree_ops.secret import MASK, redact

__all__ = [
    "DecodeFigures",
    "Event",
    "ExceptionBlock",
    "Frame",
    "Phase",
    "PhaseKind",
    "Prefix",
    "ServerArgs",
    "TextLine",
    "Traceback",
    "parse_decode",
    "parse_events",
    "parse_phase",
    "parse_prefix",
    "parse_server_args",
]

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z][A-Z_]{0,15}\d{1,5})*)\] ?")
_LOGGER = re.compile(r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)(?: [\w.]+\.py:\d+)?:\s+")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Head of a log record: ``time`` as printed (the server's local time), ``rank`` such as ``TP0`` or ``DP0 TP3``."""

    time: str
    rank: str
    body: str


def parse_prefix(text: str) -> Prefix | None:
    """The prefix and the text after it (also after a logger's ``INFO file.py:12: ``), or None without one."""
    if not text.startswith("["):
        return None
    match = _PREFIX.match(text)
    if match is None:
        return None
    body = text[match.end() :]
    logger = _LOGGER.match(body)
    return Prefix(match[1], match[2].strip(), body[logger.end() :] if logger else body)


class PhaseKind(StrEnum):
    """What a line tells about the life of the server, in the usual order."""

    ARGUMENTS = "arguments"
    DISTRIBUTED = "distributed"
    WEIGHTS_BEGIN = "weights-begin"
    WEIGHTS = "weights"
    WEIGHTS_END = "weights-end"
    KV_CACHE = "kv-cache"
    GRAPH_BEGIN = "graph-begin"
    GRAPH_SIZES = "graph-sizes"
    GRAPH = "graph"
    GRAPH_END = "graph-end"
    DRAFT_READY = "draft-ready"
    LIMITS = "limits"
    STARTING_HTTP = "starting-http"
    HTTP = "http"
    WARMUP = "warm-up"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Phase:
    """One step in the life of the server.

    :param message: one line for a person.
    :param done: shards loaded, graphs captured; 0 where the line does not count.
    :param total: of how many; 0 where the line does not count.
    :param fields: figures of the line under the names it prints (``elapsed``, ``avail mem`` ... as text).
    """

    kind: PhaseKind
    message: str
    time: str = ""
    rank: str = ""
    done: int = 0
    total: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """``done / total`` in 0..1, or None where the line does not count."""
        return min(self.done / self.total, 1.0) if self.total else None


_PHASES: dict[str, PhaseKind] = {
    "server_args=ServerArgs(": PhaseKind.ARGUMENTS,
    "Init torch distributed begin": PhaseKind.DISTRIBUTED,
    "Load weight begin": PhaseKind.WEIGHTS_BEGIN,
    "Load weight end": PhaseKind.WEIGHTS_END,
    "KV Cache is allocated": PhaseKind.KV_CACHE,
    "Capture cuda graph begin": PhaseKind.GRAPH_BEGIN,
    "Capture piecewise CUDA graph begin": PhaseKind.GRAPH_BEGIN,
    "Capture cuda graph bs": PhaseKind.GRAPH_SIZES,
    "Capture cuda graph end": PhaseKind.GRAPH_END,
    "Capture piecewise CUDA graph end": PhaseKind.GRAPH_END,
    "Initialized DFLASH draft runner": PhaseKind.DRAFT_READY,
    "Initialized DDTREE draft runner": PhaseKind.DRAFT_READY,
    "max_total_num_tokens=": PhaseKind.LIMITS,
    "Started server process": PhaseKind.STARTING_HTTP,
    "Uvicorn running on": PhaseKind.HTTP,
    "Running warmup": PhaseKind.WARMUP,
    "Start of pd disaggregation warmup": PhaseKind.WARMUP,
    "The server is fired up and ready to roll": PhaseKind.READY,
    "SIGTERM received": PhaseKind.STOPPING,
    "Signal SIGTERM received": PhaseKind.STOPPING,
    "Gracefully exiting": PhaseKind.STOPPING,
    "Shutting down": PhaseKind.STOPPING,
    "Scheduler hit an exception": PhaseKind.FAILED,
    "DetokenizerManager hit an exception": PhaseKind.FAILED,
    "TokenizerManager hit an exception": PhaseKind.FAILED,
    "MultiTokenizerRouter hit an exception": PhaseKind.FAILED,
    "DataParallelController hit an exception": PhaseKind.FAILED,
    "Initialization failed": PhaseKind.FAILED,
    "SIGQUIT received": PhaseKind.FAILED,
    "Received sigquit from a child process": PhaseKind.FAILED,
}
_PHASE = re.compile("|".join(re.escape(text) for text in _PHASES))
_SUBPROCESS = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed")
_SHARDS = re.compile(
    r"(?:Loading|Multi-thread loading)\b[^|%]{0,60}?shards: +(\d+)% Completed \| (\d+)/(\d+)"
)
_CAPTURE = re.compile(r"Capturing (?:batches|num tokens) \(([^)]*)\): +\d+%\|[^|]*\| (\d+)/(\d+)")
_FIGURE = re.compile(r"([A-Za-z#_][\w #]{0,40}?)[=:] ?([^,=:]+?)(?: (?:GB|s)\b)?(?=[.,](?: |$)|$)")


def parse_phase(text: str) -> Phase | None:
    """What ``text`` says about the server's life, or None. One line, cheap; safe on any text.

    Progress bars count in ``done`` and ``total``: weight shards, and graphs captured.
    """
    if text.startswith("["):
        prefix = parse_prefix(text)
    else:
        prefix = None
        if "% Completed |" in text or "Capturing" in text:
            return _progress(text)
    body = text if prefix is None else prefix.body
    if prefix is None and (logger := _LOGGER.match(text)):
        body = text[logger.end() :]
    time, rank = (prefix.time, prefix.rank) if prefix else ("", "")
    match = _PHASE.match(body)
    if match is None:
        return Phase(PhaseKind.FAILED, _short(body), time, rank) if _SUBPROCESS.match(body) else None
    kind = _PHASES[match[0]]
    if kind is PhaseKind.ARGUMENTS:
        return Phase(kind, "arguments parsed", time, rank)
    fields = {
        name.strip(): value.strip()
        for name, value in _FIGURE.findall(body[:400].removeprefix(match[0]).lstrip(". "))
    }
    if kind is PhaseKind.LIMITS:
        fields = dict(re.findall(r"(\w+)=([\w.]+)", body[:600]))
    return Phase(kind, _short(body), time, rank, fields=fields)


def _progress(text: str) -> Phase | None:
    last: Phase | None = None
    if "% Completed |" in text:
        for match in _SHARDS.finditer(text[-4000:]):
            done, total = int(match[2]), int(match[3])
            last = Phase(PhaseKind.WEIGHTS, f"weights {done}/{total}", done=done, total=total)
    elif "Capturing" in text:
        for match in _CAPTURE.finditer(text[-4000:]):
            done, total = int(match[2]), int(match[3])
            fields = dict(part.split("=", 1) for part in match[1].split(" ") if "=" in part)
            last = Phase(PhaseKind.GRAPH, f"graphs {done}/{total}", done=done, total=total, fields=fields)
    return last


def _short(body: str) -> str:
    return redact(body if len(body) <= 200 else body[:199] + "…")


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """A ``Decode batch`` line: one every 40 decode steps. What the line does not print is None.

    :param accept_len: tokens accepted a verify step, the bonus token included; never above the block size.
    :param accept_rate: accepted drafts over proposed drafts, 0..1.
    :param gen_throughput: tokens a second since the previous such line.
    """

    running: int | None
    tokens: int | None = None
    token_usage: float | None = None
    accept_len: float | None = None
    accept_rate: float | None = None
    cuda_graph: bool | None = None
    gen_throughput: float | None = None
    queued: int | None = None
    time: str = ""
    rank: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


def _figures(text: str, head: str) -> tuple[Prefix, dict[str, str]] | None:
    if head not in text:
        return None
    prefix = parse_prefix(text) or Prefix("", "", text)
    if not prefix.body.startswith(head):
        return None
    fields: dict[str, str] = {}
    for part in prefix.body[len(head) : 2000].split(", "):
        name, colon, value = part.partition(": ")
        if colon:
            fields[name.strip(" ,")] = value.strip(" ,")
    return prefix, fields


def _number(fields: Mapping[str, str], *names: str) -> float | None:
    for name in names:
        if name in fields:
            try:
                return float(fields[name])
            except ValueError:
                return None
    return None


def _count(fields: Mapping[str, str], *names: str) -> int | None:
    value = _number(fields, *names)
    return int(value) if value is not None and value == value and abs(value) < 1e15 else None


def _flag(fields: Mapping[str, str], *names: str) -> bool | None:
    for name in names:
        if fields.get(name) in ("True", "False"):
            return fields[name] == "True"
    return None


def parse_decode(text: str) -> DecodeFigures | None:
    """The figures of a ``Decode batch`` line, or None for any other line. Fields come and go between releases."""
    found = _figures(text, "Decode batch")
    if found is None:
        return None
    prefix, fields = found
    return DecodeFigures(
        running=_count(fields, "#running-req"),
        tokens=_count(fields, "#token", "#full token"),
        token_usage=_number(fields, "token usage", "full token usage"),
        accept_len=_number(fields, "accept len"),
        accept_rate=_number(fields, "accept rate"),
        cuda_graph=_flag(fields, "cuda graph"),
        gen_throughput=_number(fields, "gen throughput (token/s)"),
        queued=_count(fields, "#queue-req"),
        time=prefix.time,
        rank=prefix.rank,
        fields=fields,
    )


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """A ``server_args=ServerArgs(...)`` dump. Values are int, float, bool, None or text; secrets are masked."""

    line: LogLine
    values: Mapping[str, Any]


_SECRET_NAME = re.compile(
    r"(?:api_key|password|secret|authorization|(?:access|auth|hf|hub)_token)", re.IGNORECASE
)
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.?)*(?:'|\Z)|"(?:[^"\\]|\\.?)*(?:"|\Z)|[][(){},=]""", re.DOTALL)
_TELLTALE = re.compile(r"key|token|secret|passw|auth", re.IGNORECASE)


def parse_server_args(text: str) -> dict[str, Any] | None:
    """The fields of a ``ServerArgs(...)`` dump in ``text``, or None if there is none.

    Reads quotes and brackets only, never evaluates; a dump cut off in the middle gives what came before.
    """
    start = text.find("ServerArgs(")
    if start < 0:
        return None
    values: dict[str, Any] = {}
    depth, name, begin = 0, "", start + len("ServerArgs(")
    for token in _TOKEN.finditer(text, begin, start + (1 << 17)):
        char = token[0][0]
        if char in "'\"":
            continue
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE and depth:
            depth -= 1
        elif depth:
            continue
        elif char == "=":
            if not name:
                name, begin = text[begin : token.start()].strip(), token.end()
        else:
            if name.isidentifier():
                values[name] = _value(name, text[begin : token.start()].strip())
            name, begin = "", token.end()
            if char == ")":
                break
    return values


def _value(name: str, raw: str) -> Any:
    constants: dict[str, Any] = {"None": None, "True": True, "False": False}
    if raw in constants:
        return constants[raw]
    if _SECRET_NAME.search(name):
        return MASK
    if len(raw) >= 2 and raw[0] in "'\"" and raw[-1] == raw[0]:
        return redact(raw[1:-1]) if _TELLTALE.search(raw) else raw[1:-1]
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return redact(raw)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback; ``code`` is the source line under it, if printed."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class ExceptionBlock:
    """One exception of a chain.

    :param type: dotted class name; empty where the traceback was cut off before it.
    :param message: text behind the colon, continuation lines included.
    :param link: how it follows the one before: ``""`` (the first), ``"during"`` or ``"cause"``.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    link: str = ""
    number: int = 0

    @property
    def text(self) -> str:
        """``type: message`` as Python prints it."""
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True, slots=True)
class Traceback:
    """One traceback record with its whole chain, in the order printed: the deepest cause first.

    :param header: text before ``Traceback (most recent call last)`` on its line, e.g. ``Scheduler hit an exception:``.
    :param before: the line before a traceback that has no header of its own, if that line announces one.
    :param number: line number of the header.
    """

    header: str
    rank: str
    time: str
    number: int
    pid: int | None
    exceptions: tuple[ExceptionBlock, ...]
    before: str = ""


@dataclass(frozen=True, slots=True)
class TextLine:
    """Any other line. ``body`` is the text behind the prefix; ``time`` is the line's own or else the prefix's."""

    line: LogLine
    time: str
    rank: str
    body: str


Event = TextLine | Traceback | ServerArgs

_MARK = "Traceback (most recent call last)"
_DURING = "During handling of the above exception, another exception occurred:"
_CAUSE = "The above exception was the direct cause of the following exception:"
_FRAME = re.compile(r'\s+File "([^"]{0,500})", line (\d{1,9})(?:, in (.{1,200}))?\s*$')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,200})(?::(?: (.*))?)?$", re.DOTALL)
_RANKED = re.compile(r"\[rank(\d{1,5})\]:\s?")
_BOX = re.compile(r"\s{0,40}(?:[|+](?: |$)|\+-[-+ ]{0,80})")
_UNRELATED = re.compile(
    r"(?:exit \d+$|/[^\s:]+:\d+: \w*Warning|<frozen \w|Multi-thread loading|Loading \w+ checkpoint|INFO: |ERROR: |WARNING: "
    r"|\[Gloo\]|\[[A-Z]\d{4} \d\d:|[IWEF]\d{4} \d\d:|usage: )"
)
_CARET = re.compile(r"\s*[\^~]+\s*$")
_KEEP_FRAMES = 80
_KEEP_MESSAGE = 24
_KEEP_OPEN = 64
_PATIENCE = 400


class _State(StrEnum):
    FRAMES = "frames"
    MESSAGE = "message"
    GAP = "gap"
    LINKED = "linked"


@dataclass(slots=True)
class _Open:
    """A traceback being read."""

    header: str
    rank: str
    time: str
    number: int
    pid: int | None
    touched: int
    before: str = ""
    state: _State = _State.FRAMES
    link: str = ""
    type: str = ""
    message: list[str] = field(default_factory=list)
    at: int = 0
    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=_KEEP_FRAMES))
    done: list[ExceptionBlock] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.state in (_State.MESSAGE, _State.GAP)

    def shut(self) -> None:
        if self.type or self.frames:
            if len(self.done) >= 16:
                del self.done[8]
            self.done.append(
                ExceptionBlock(
                    self.type, "\n".join(self.message).rstrip(), tuple(self.frames), self.link, self.at
                )
            )
        self.type, self.message, self.at = "", [], 0
        self.frames.clear()

    def record(self) -> Traceback | None:
        self.shut()
        if not self.done and not self.header:
            return None
        return Traceback(
            self.header, self.rank, self.time, self.number, self.pid, tuple(self.done), self.before
        )


def parse_events(lines: Iterable[LogLine]) -> Iterator[Event]:
    """Events in the order in which they end. One pass, bounded memory.

    A line that belongs to a traceback is part of that record and is not given out by itself.
    """
    stacks: dict[int | None, list[_Open]] = {}
    announced: dict[int | None, tuple[str, str, str]] = {}
    for index, line in enumerate(lines):
        text = line.text
        stack = stacks.get(line.pid)
        prefix = parse_prefix(text)
        rank = prefix.rank if prefix else ""
        body = prefix.body if prefix else text
        if stack or _MARK in body or body.startswith(("[rank", "  File ")):
            if prefix is None and (ranked := _RANKED.match(body)):
                rank, body = f"TP{ranked[1]}", body[ranked.end() :]
            if prefix is None and (box := _BOX.match(body)) and (stack or _MARK in body):
                body = (
                    body[box.end() - 1 :]
                    if not body[: box.end()].strip("|+- ") and body[box.end() :]
                    else body
                )
        if _MARK in body:
            stack = stacks.setdefault(line.pid, [])
            top = stack[-1] if stack else None
            if prefix is None and top is not None and top.state is _State.LINKED:
                top.state, top.touched = _State.FRAMES, index
                continue
            if top is not None and top.finished:
                yield from _close(stack)
            header = body[: body.find(_MARK)].strip()
            when = line.time or (prefix.time if prefix else "")
            before, before_time, before_rank = (
                ("", "", "") if header else announced.get(line.pid, ("", "", ""))
            )
            opened = _Open(
                header, rank or before_rank, when or before_time, line.number, line.pid, index, before
            )
            stack.append(opened)
            if len(stack) > _KEEP_OPEN:
                yield from _emit(stack.pop(0))
            continue
        if stack:
            if prefix is None and line.source == "process":
                if _take(stack[-1], body, line, index):
                    continue
                while stack and stack[-1].finished:
                    yield from _close(stack)
                    if stack and not _blank(body) and _take(stack[-1], body, line, index):
                        break
                else:
                    yield from _other(line, prefix, rank, body, stacks, index)
                continue
            while stack and (stack[-1].finished or index - stack[-1].touched > _PATIENCE):
                yield from _close(stack)
        if len(stacks) > _KEEP_OPEN or len(announced) > 4096:
            for pid in [pid for pid, opened in stacks.items() if not opened]:
                del stacks[pid]
            announced.clear()
            if len(stacks) > _KEEP_OPEN:
                for opened in stacks.pop(next(iter(stacks))):
                    yield from _emit(opened)
        if prefix is not None or body.endswith(":") or body.startswith("Exception "):
            announced[line.pid] = (body[:400], prefix.time if prefix else line.time, rank)
        elif announced:
            announced.pop(line.pid, None)
        yield from _other(line, prefix, rank, body, stacks, index)
    for stack in stacks.values():
        for opened in stack:
            yield from _emit(opened)


def _blank(body: str) -> bool:
    return not body or body.isspace()


def _emit(opened: _Open) -> Iterator[Traceback]:
    record = opened.record()
    if record is not None:
        yield record


def _close(stack: list[_Open]) -> Iterator[Traceback]:
    yield from _emit(stack.pop())


def _other(
    line: LogLine,
    prefix: Prefix | None,
    rank: str,
    body: str,
    stacks: dict[int | None, list[_Open]],
    index: int,
) -> Iterator[Event]:
    if prefix is None and body.startswith("  File ") and (frame := _FRAME.match(body)):
        opened = _Open("", rank, line.time, line.number, line.pid, index)
        opened.frames.append(Frame(frame[1], int(frame[2]), frame[3] or ""))
        stacks.setdefault(line.pid, []).append(opened)
        return
    if "ServerArgs(" in body and (values := parse_server_args(body)) is not None:
        yield ServerArgs(line, values)
        return
    yield TextLine(line, line.time or (prefix.time if prefix else ""), rank, body)


def _take(opened: _Open, body: str, line: LogLine, index: int) -> bool:
    """Add an unprefixed line to a traceback; False if it cannot belong to it."""
    state = opened.state
    frame = _FRAME.match(body) if body.startswith(" ") else None
    if frame is not None:
        if state is not _State.FRAMES:
            return False
        opened.frames.append(Frame(frame[1], int(frame[2]), frame[3] or ""))
    elif _blank(body):
        if state is _State.MESSAGE:
            opened.state = _State.GAP
        elif state is _State.GAP:
            return False
    elif body.startswith((_DURING, _CAUSE)):
        if not opened.finished:
            return False
        opened.shut()
        opened.link = "during" if body.startswith(_DURING) else "cause"
        opened.state = _State.LINKED
    elif state is _State.FRAMES:
        if body[0].isspace():
            if opened.frames and not opened.frames[-1].code and not _CARET.match(body):
                last = opened.frames[-1]
                opened.frames[-1] = Frame(last.file, last.line, last.function, body.strip()[:300])
        else:
            match = _EXCEPTION.match(body) if not _UNRELATED.match(body) else None
            if match is None:
                return False
            opened.type, opened.at, opened.state = match[1], line.number, _State.MESSAGE
            opened.message = [(match[2] or "")[:8000]]
    elif state is _State.MESSAGE:
        if _UNRELATED.match(body):
            return False
        if len(opened.message) < _KEEP_MESSAGE:
            opened.message.append(body[:2000])
    else:
        return False
    opened.touched = index
    return True
