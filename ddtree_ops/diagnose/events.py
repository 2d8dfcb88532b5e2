"""SGLang's output as events. Pure: lines in, events out, nothing is judged here.

A line carries a prefix ``[2026-01-29 00:24:41 DP0 TP3 EP3] `` with time and rank. A traceback is one record over
many lines of which only the first is prefixed; eight ranks print theirs at the same time. In a journal the PID
tells them apart, else a label such as ``[rank3]:`` or ``(TP3 pid=4711)``; in a plain file see
:mod:`ddtree_ops.diagnose.shuffled`. No line is counted on: the log may have been thinned out between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ddtree_ops.diagnose.lines import LogLine
from ddtree_ops.diagnose.shuffled import Cluster, Head
from ddtree_ops.diagnose.tracebacks import (
    CAUSE,
    DURING,
    LINKED,
    MARK,
    Collector,
    ExceptionBlock,
    Frame,
    NativeCollector,
    Traceback,
    lone_exception,
    native_begin,
    root_block,
)
from ddtree_ops.secret import MASK, redact

__all__ = [
    "LOADING",
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
    "parse_command",
    "parse_decode",
    "parse_events",
    "parse_phase",
    "parse_prefix",
    "parse_server_args",
    "phase_of",
    "root_block",
]

_PREFIX = re.compile(
    r"\[(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z][A-Z_]{0,15}\d{1,5})*)\] ?"
    r"(?:(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)(?: [\w.]+\.py:\d+)?:\s+)?"
)
_LOGGER = re.compile(r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)(?: [\w.]+\.py:\d+)?:\s+")


class Prefix(NamedTuple):
    """Head of a log record: ``time`` as printed (the server's local time), ``rank`` such as ``TP0`` or ``DP0 TP3``."""

    time: str
    rank: str
    body: str


def parse_prefix(text: str) -> Prefix | None:
    """The prefix and the text after it (also after a logger's ``INFO file.py:12: ``), or None without one."""
    if text[:1] != "[":
        return None
    match = _PREFIX.match(text)
    if match is None:
        return None
    return Prefix(match[1], match[2][1:], text[match.end() :])


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


LOADING: Mapping[PhaseKind, str] = {
    PhaseKind.WEIGHTS_BEGIN: "weights",
    PhaseKind.WEIGHTS: "weights",
    PhaseKind.WEIGHTS_END: "weights",
    PhaseKind.KV_CACHE: "kv-cache",
    PhaseKind.GRAPH_BEGIN: "graphs",
    PhaseKind.GRAPH_SIZES: "graphs",
    PhaseKind.GRAPH: "graphs",
    PhaseKind.GRAPH_END: "graphs",
    PhaseKind.STARTING_HTTP: "warm-up",
    PhaseKind.HTTP: "warm-up",
    PhaseKind.WARMUP: "warm-up",
}
"""What an operator calls the steps between the arguments and readiness."""


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
_BARS = frozenset({"Lo", "Mu", "Ca"})
_LEVELS = frozenset({"IN", "WA", "ER", "CR", "DE"})
_STARTS = frozenset({text[:2] for text in _PHASES}) | _BARS | _LEVELS | {"Su"}
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
    prefix = parse_prefix(text) if text[:1] == "[" else None
    if prefix is None:
        return phase_of(text)
    return phase_of(prefix.body, prefix.time, prefix.rank)


def phase_of(body: str, time: str = "", rank: str = "") -> Phase | None:
    """The same for a line whose prefix is known already."""
    start = body[:2]
    if start not in _STARTS:
        return None
    if start in _BARS and not time and ("% Completed |" in body or "Capturing" in body):
        return _progress(body)
    if start in _LEVELS and not time and (logger := _LOGGER.match(body)):
        body = body[logger.end() :]
    match = _PHASE.match(body)
    if match is None:
        return Phase(PhaseKind.FAILED, _short(body), time, rank) if _SUBPROCESS.match(body) else None
    kind = _PHASES[match[0]]
    if kind is PhaseKind.ARGUMENTS:
        return Phase(kind, "arguments parsed", time, rank)
    if kind is PhaseKind.LIMITS:
        fields = dict(re.findall(r"(\w+)=([\w.]+)", body[:600]))
    else:
        fields = {
            name.strip(): value.strip()
            for name, value in _FIGURE.findall(body[:400].removeprefix(match[0]).lstrip(". "))
        }
    return Phase(kind, _short(body), time, rank, fields=fields)


def _progress(text: str) -> Phase | None:
    last: Phase | None = None
    if "% Completed |" in text:
        for match in _SHARDS.finditer(text[-600:]):
            done, total = int(match[2]), int(match[3])
            last = Phase(PhaseKind.WEIGHTS, f"weights {done}/{total}", done=done, total=total)
    elif "Capturing" in text:
        for match in _CAPTURE.finditer(text[-600:]):
            done, total = int(match[2]), int(match[3])
            fields = dict(part.split("=", 1) for part in match[1].split(" ") if "=" in part)
            last = Phase(PhaseKind.GRAPH, f"graphs {done}/{total}", done=done, total=total, fields=fields)
    return last


@lru_cache(maxsize=256)
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
    """The server's arguments. Values are int, float, bool, None or text; secrets are masked.

    :param start: the server printed them as it started; False for those of an answer of ``/server_info``.
    """

    line: LogLine
    values: Mapping[str, Any]
    start: bool = True


_SECRET_NAME = re.compile(
    r"(?:api_key|password|secret|authorization|(?:access|auth|hf|hub)_token)", re.IGNORECASE
)
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.?)*(?:'|\Z)|"(?:[^"\\]|\\.?)*(?:"|\Z)|[][(){},=]""", re.DOTALL)
_SIMPLE = re.compile(r"""\s*([A-Za-z_]\w*)=('[^'\\]*'|[\w.+-]+|\[[^][(){}'"]*\])(,|\))""")
_TELLTALE = re.compile(r"key|token|secret|passw|auth", re.IGNORECASE)
_DUMP = "ServerArgs("
_DUMP_LIMIT = 1 << 17


def parse_server_args(text: str) -> dict[str, Any] | None:
    """The fields of a ``ServerArgs(...)`` dump in ``text``, or None if there is none.

    Reads quotes and brackets only, never evaluates; a dump cut off in the middle gives what came before.
    """
    start = text.find(_DUMP)
    return None if start < 0 else _scan(text, start)[0]


def _scan(text: str, start: int) -> tuple[dict[str, Any], bool]:
    """Fields of the dump at ``start``, and whether it is closed."""
    values: dict[str, Any] = {}
    begin, end = start + len(_DUMP), start + _DUMP_LIMIT
    while True:
        while (plain := _SIMPLE.match(text, begin, end)) is not None:
            values[plain[1]] = _value(plain[1], plain[2])
            begin = plain.end()
            if plain[3] == ")":
                return values, True
        found = _nested(text, begin, end)
        if found is None:
            return values, False
        name, raw, begin, closed = found
        if name.isidentifier():
            values[name] = _value(name, raw)
        if closed:
            return values, True


def _nested(text: str, begin: int, end: int) -> tuple[str, str, int, bool] | None:
    """The next field, brackets and quotes in its value: name, value, where it ends, and whether the dump does."""
    depth, name = 0, ""
    for token in _TOKEN.finditer(text, begin, end):
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
            return name, text[begin : token.start()].strip(), token.end(), char == ")"
    return None


_COMMAND = re.compile(
    r"(?:\bsglang[./](?:[\w/]{1,40}/)?launch_server(?:\.py)?|\bsglang serve)(?=\s+[-\\\w./])"
)
_FLAG = re.compile(
    r"--([a-z][a-z0-9-]{1,60})(?:=|\s+)('[^'\n]{0,400}'|\"[^\"\n]{0,400}\"|[^\s'\"`\\-][^\s\"'`\\]{0,400})"
)
_SHORT_FLAGS = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "model": "model_path",
    "speculative_algo": "speculative_algorithm",
    "speculative_draft_model": "speculative_draft_model_path",
}
"""Other spellings of flags -> field of ``ServerArgs``."""


def parse_command(text: str) -> dict[str, Any] | None:
    """Fields of ``ServerArgs`` that a command line in ``text`` sets, or None where there is no such command.

    Understood: ``python -m sglang.launch_server --tp 8 ...`` and ``sglang serve ...``; flags without a value are left out.
    """
    command = _COMMAND.search(text)
    if command is None:
        return None
    values: dict[str, Any] = {}
    for flag in _FLAG.finditer(text, command.end(), command.end() + 8000):
        name = flag[1].replace("-", "_")
        name = _SHORT_FLAGS.get(name, name)
        values[name] = _value(name, flag[2])
    return values


def _json_arguments(text: str) -> dict[str, Any] | None:
    """The arguments in the JSON of ``/server_info``, or None if ``text`` is something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    nested = found.get("server_args")
    source = nested if isinstance(nested, dict) else found
    if not source.keys() >= _ARGUMENT_NAMES:
        return None
    return {name: _plain(name, value) for name, value in source.items()}


_ARGUMENT_NAMES = {"model_path", "tp_size"}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return _value(name, repr(value) if not isinstance(value, str) else repr(value)[:4000])


_CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False}


@lru_cache(maxsize=2048)
def _secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def _value(name: str, raw: str) -> Any:
    if raw in _CONSTANTS:
        return _CONSTANTS[raw]
    if _secret(name):
        return MASK
    if len(raw) >= 2 and raw[0] in "'\"" and raw[-1] == raw[0]:
        return redact(raw[1:-1]) if _TELLTALE.search(raw) else raw[1:-1]
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            continue
    return redact(raw)


class TextLine(NamedTuple):
    """Any other line. ``body`` is the text behind the prefix; ``time`` is the line's own or else the prefix's."""

    line: LogLine
    time: str
    rank: str
    body: str


Event = TextLine | Traceback | ServerArgs

_LABEL = re.compile(
    r"\[rank(\d{1,5})\]: ?|\[default(\d{1,5})\]:|\(([^()]{0,80}?)\bpid=(\d{1,10})[^()]{0,60}\) ?"
)
_RANKS = re.compile(r"\[((?:TP|DP|PP|EP)\d{1,5}(?: (?:TP|DP|PP|EP)\d{1,5})*)\] ?")
"""A prefix whose time was taken away."""
_RANK = re.compile(r"(?:TP|DP|PP|EP)\d{1,5}")
_BAR = re.compile(r"\s{0,40}\| ?")
_SEPARATOR = re.compile(r"\s{0,40}\+[-+ ]{2,80}(?: ?(\d{1,4}|\.\.\.) -{2,80})?\s*$")
_FIELD = re.compile(r'\s+"(\w{1,80})": (.{0,4000}?),?\s*$')
_KEEP_STREAMS = 64
_PATIENCE = 400
_CLUSTER_PATIENCE = 60
_LULL = 24
_KEEP_DUMP = 400
_ANNOUNCING = ("Exception ", "ERROR: ", "ERROR - ", "ERROR ", "CRITICAL: ")
"""Starts of a line that a traceback without a header of its own may belong to."""


@dataclass(slots=True)
class _Stream:
    """What is open of one process."""

    one: Collector | None = None
    cluster: Cluster | None = None
    native: NativeCollector | None = None
    dump: list[str] | None = None
    dumped: LogLine | None = None
    fields: dict[str, Any] | None = None
    boxed: bool = False
    torn: int = 0
    mended: int = 0

    @property
    def idle(self) -> bool:
        return (
            self.one is None
            and self.cluster is None
            and self.native is None
            and self.dump is None
            and self.fields is None
        )


def _heads(body: str) -> bool:
    """Whether a traceback begins after this line."""
    return MARK in body and body.rstrip().endswith((MARK, MARK + ":"))


class _Parser:
    def __init__(self) -> None:
        self.streams: dict[int | str | None, _Stream] = {}
        self.announced: dict[int | str | None, tuple[str, str, str]] = {}
        self.under: dict[int | str | None, str] = {}
        self.confirmed: set[int | str | None] = set()
        self.owned: set[str] = set()
        self.out: list[Event] = []

    def feed(self, line: LogLine, index: int) -> None:
        text = line.text
        prefix: Prefix | None = None
        rank, body = "", text
        key: int | str | None = line.pid
        if line.host:
            key = line.host if key is None else f"{line.host} {key}"
        if self.streams and (line.source != "process" or not index % 16):
            self._sweep(index, 0 if line.source != "process" else _LULL)
        if line.source != "process":
            self.out.append(TextLine(line, line.time, "", text))
            return
        first = text[:1]
        if first == "[":
            prefix = parse_prefix(text)
            if prefix is not None:
                rank, body = prefix.rank, prefix.body
                if body[:1] == "[":
                    key, rank, body = self._labelled(key, rank, body)
            else:
                key, rank, body = self._labelled(key, rank, body)
        elif first == "(":
            key, rank, body = self._labelled(key, rank, body)
        loose = prefix is None
        if prefix is not None and (self.owned or body[:7] == "  File "):
            own = f"={rank}"
            if own in self.owned or self._adopt(key, own, rank, body):
                key, loose = own, True
        stream = self.streams.get(key)
        if self.under and stream is not None and not stream.idle:
            body, loose = self._under(key, body, loose)
        if (
            stream is not None
            and not stream.idle
            and self._busy(stream, key, line, prefix, rank, body, index, loose)
        ):
            return
        if MARK in body and _heads(body):
            self._header(key, line, prefix, rank, body, index)
            return
        if loose and self._begin(key, line, rank, body, index):
            return
        if not loose and self._prefixed(key, line, rank, body, index):
            return
        if prefix is not None or body.endswith(":") or body.startswith(_ANNOUNCING):
            self.announced[key] = (body, prefix.time if prefix else line.time, rank)
            if len(self.announced) > 4096:
                self.announced.clear()
        elif self.announced:
            self.announced.pop(key, None)
        self.out.append(TextLine(line, line.time or (prefix.time if prefix else ""), rank, body))

    def _sweep(self, index: int, patience: int = 0) -> None:
        """Give out what is finished in all streams and was not touched for some lines."""
        for key in list(self.streams):
            stream = self.streams[key]
            one, native = stream.one, stream.native
            if one is not None and one.finished and index - one.touched > patience:
                self._close_one(stream)
            if native is not None and index - native.touched > patience:
                self._close_native(stream)
            if stream.idle:
                del self.streams[key]
                if isinstance(key, str):
                    self.owned.discard(key)

    def _labelled(self, key: int | str | None, rank: str, body: str) -> tuple[int | str | None, str, str]:
        match = _LABEL.match(body)
        if match is None:
            if (ranks := _RANKS.match(body)) is not None:
                return key, rank or ranks[1], body[ranks.end() :]
            return key, rank, body
        number = match[1] or match[2]
        if number is not None:
            return match[0].rstrip(), rank or f"TP{number}", body[match.end() :]
        named = _RANK.search(match[3])
        return f"pid {match[4]}", rank or (named[0] if named else ""), body[match.end() :]

    def _under(self, key: int | str | None, body: str, loose: bool) -> tuple[str, bool]:
        """A line without what a logger put before each line of the traceback that is open, if it has that."""
        common = self.under.get(key)
        if common is None or not body.startswith(common):
            return body, loose
        rest = body[len(common) :]
        if rest.startswith('  File "'):
            self.confirmed.add(key)
        elif key not in self.confirmed:
            return body, loose
        return rest, True

    def _adopt(self, key: int | str | None, own: str, rank: str, body: str) -> bool:
        """A frame behind a prefix of its own: this log prefixes every line, the ranks are told apart by it."""
        stream = self.streams.get(key)
        if stream is None or not body.startswith('  File "'):
            return False
        taken: Collector | None = None
        if stream.one is not None and stream.one.rank == rank and stream.one.empty:
            taken, stream.one = stream.one, None
        elif stream.cluster is not None:
            for place, head in enumerate(stream.cluster.heads):
                if head.rank == rank and not stream.cluster.lines:
                    taken = Collector(
                        head.header, rank, head.time, head.number, stream.cluster.pid, 0, head.before
                    )
                    del stream.cluster.heads[place]
                    break
            if not stream.cluster.heads:
                stream.cluster = None
        if taken is None:
            return False
        self.owned.add(own)
        self.streams[own] = _Stream(taken)
        return True

    def _stream(self, key: int | str | None) -> _Stream:
        stream = self.streams.get(key)
        if stream is None:
            if len(self.streams) >= _KEEP_STREAMS:
                for name in [name for name, opened in self.streams.items() if opened.idle]:
                    del self.streams[name]
                    if isinstance(name, str):
                        self.owned.discard(name)
                if len(self.streams) >= _KEEP_STREAMS:
                    oldest = next(iter(self.streams))
                    self._close(self.streams.pop(oldest))
                    if isinstance(oldest, str):
                        self.owned.discard(oldest)
            stream = self.streams[key] = _Stream()
        return stream

    def _busy(
        self,
        stream: _Stream,
        key: int | str | None,
        line: LogLine,
        prefix: Prefix | None,
        rank: str,
        body: str,
        index: int,
        loose: bool,
    ) -> bool:
        """Whether the line belongs to what is open; what it ends is given out."""
        if stream.dump is not None:
            if loose and len(stream.dump) < _KEEP_DUMP and not self._telling(body):
                stream.dump.append(body)
                if ")" in body:
                    self._dumped(stream, only_closed=True)
                return True
            self._dumped(stream)
        if stream.fields is not None:
            match = _FIELD.match(body) if loose else None
            if match is not None:
                self._field(stream.fields, match)
                return True
            if loose and body[:1].isspace():
                return True
            self._fields(stream)
        if stream.native is not None:
            if loose and not _heads(body) and stream.native.take(body, line.number, line.text):
                stream.native.touched = index
                return True
            self._close_native(stream)
        if stream.cluster is not None:
            return self._clustered(stream, line, rank, body, index, loose)
        one = stream.one
        if one is None:
            return False
        if loose and not _heads(body):
            if stream.boxed and (found := self._unboxed(one, body)) is not None:
                body = found
                if not body:
                    return True
            if one.indent and body[: one.indent].isspace():
                body = body[one.indent :]
            if one.take(body, line.number):
                one.touched = index
                return True
            if one.finished or index - one.touched > _PATIENCE:
                self._close_one(stream)
            elif body.startswith((DURING, CAUSE)):
                stream.torn += 1
                return True
            return False
        if _heads(body):
            if loose and stream.torn:
                stream.torn -= 1
                stream.mended += 1
                return True
            boxed = stream.boxed and body.lstrip().startswith("|")
            if (loose or boxed) and (
                one.state == LINKED or (one.link == "group" and not one.files and not one.type)
            ):
                one.resume()
                one.touched = index
                return True
            return False
        if one.finished or index - one.touched > _PATIENCE:
            self._close_one(stream)
        return False

    def _unboxed(self, one: Collector, body: str) -> str | None:
        """The text within the box of an exception group; empty where the line only draws the box."""
        if match := _SEPARATOR.match(body):
            if match[1]:
                one.member()
            return ""
        if match := _BAR.match(body):
            return body[match.end() :] or " "
        return None

    def _telling(self, body: str) -> bool:
        return (
            not body
            or body.isspace()
            or _heads(body)
            or body.startswith('  File "')
            or lone_exception(body) is not None
        )

    def _clustered(
        self, stream: _Stream, line: LogLine, rank: str, body: str, index: int, loose: bool
    ) -> bool:
        cluster = stream.cluster
        if cluster is None:
            return False
        if _heads(body):
            if loose and body.startswith("Traceback") and cluster.inner():
                cluster.touched = index
                return True
            idle = index - cluster.touched
            if idle > _CLUSTER_PATIENCE or (cluster.complete and not (idle <= 3 and cluster.joins(rank))):
                self._close_cluster(stream)
            return False
        near = index - cluster.touched <= _CLUSTER_PATIENCE
        if loose and near and cluster.take(body, line.number):
            cluster.touched = index
            return True
        if cluster.complete or not near:
            self._close_cluster(stream)
        return False

    def _header(
        self, key: int | str | None, line: LogLine, prefix: Prefix | None, rank: str, body: str, index: int
    ) -> None:
        stream = self._stream(key)
        place = body.find(MARK)
        start = body[:place]
        header = start.strip(" |+\t")
        indent = place if not header and "|" not in start and "+" not in start else 0
        boxed = header.endswith("Exception Group")
        header = header.removesuffix("Exception Group").strip(" |+\t")
        if header and not boxed:
            if len(self.under) >= _KEEP_STREAMS:
                self.under.clear()
                self.confirmed.clear()
            self.under[key] = start
            self.confirmed.discard(key)
        when = line.time or (prefix.time if prefix else "")
        before, before_time, before_rank = ("", "", "") if header else self.announced.get(key, ("", "", ""))
        head = Head(header, rank or before_rank, when or before_time, line.number, before)
        if stream.cluster is not None:
            stream.cluster.open(head)
            stream.cluster.touched = index
            return
        one = stream.one
        if one is not None and not one.finished and not stream.boxed:
            stream.cluster = self._shuffled(one, head, index)
            stream.cluster.tear(stream.torn + stream.mended, stream.mended)
            stream.torn = stream.mended = 0
            stream.one = None
            return
        if one is not None:
            self._close_one(stream)
        stream.boxed = boxed
        stream.one = Collector(
            head.header, head.rank, head.time, head.number, line.pid, index, head.before, indent=indent
        )

    def _shuffled(self, one: Collector, head: Head, index: int) -> Cluster:
        first = Head(one.header, one.rank, one.time, one.number, one.before)
        cluster = Cluster([first, head], one.pid, index)
        for body, number in one.replay():
            if body == MARK + ":":
                cluster.inner()
            else:
                cluster.take(body, number)
        return cluster

    def _begin(self, key: int | str | None, line: LogLine, rank: str, body: str, index: int) -> bool:
        """Whether an unprefixed line begins a record that has no header."""
        first = body[:1]
        if not first:
            return False
        if first == " ":
            if body.startswith('  File "') and '", line ' in body:
                stream = self._stream(key)
                if stream.one is not None:
                    self._close_one(stream)
                if key is None:
                    stream.cluster = cluster = Cluster([], line.pid, index)
                    return cluster.take(body, line.number)
                stream.one = one = Collector("", rank, line.time, line.number, line.pid, index)
                return one.take(body, line.number)
            if '"model_path": ' in body and (match := _FIELD.match(body)):
                stream = self._stream(key)
                stream.fields, stream.dumped = {}, line
                self._field(stream.fields, match)
                return True
            return False
        if first == "{" and '"model_path"' in body and (values := _json_arguments(body)) is not None:
            self.out.append(ServerArgs(line, values, start=False))
            return True
        if _DUMP in body:
            return self._dump(key, line, body)
        if self._native(key, line, rank, body, index):
            return True
        if (lone := lone_exception(body)) is not None:
            one = Collector("", rank, line.time, line.number, line.pid, index, kind="line")
            one.raised(*lone, line.number)
            self._stream(key).one = one
            return True
        return False

    def _prefixed(self, key: int | str | None, line: LogLine, rank: str, body: str, index: int) -> bool:
        if _DUMP in body:
            return self._dump(key, line, body)
        return self._native(key, line, rank, body, index)

    def _native(self, key: int | str | None, line: LogLine, rank: str, body: str, index: int) -> bool:
        kind = native_begin(body)
        if kind is None:
            return False
        time = line.time or self._time(line)
        native = NativeCollector(kind, rank, time, line.number, line.pid, index)
        native.begin(body, line.text)
        if kind == "signal":
            self.out.append(native.record())
        else:
            self._stream(key).native = native
        return True

    def _time(self, line: LogLine) -> str:
        prefix = parse_prefix(line.text)
        return prefix.time if prefix else ""

    def _dump(self, key: int | str | None, line: LogLine, body: str) -> bool:
        values, closed = _scan(body, body.find(_DUMP))
        if closed or len(body) > _DUMP_LIMIT:
            self.out.append(ServerArgs(line, values))
        else:
            stream = self._stream(key)
            stream.dump, stream.dumped = [body], line
        return True

    def _dumped(self, stream: _Stream, *, only_closed: bool = False) -> None:
        text = "".join(stream.dump or ())
        values, closed = _scan(text, text.find(_DUMP))
        if (closed or not only_closed or len(text) > _DUMP_LIMIT) and stream.dumped is not None:
            self.out.append(ServerArgs(stream.dumped, values))
            stream.dump = None

    def _field(self, fields: dict[str, Any], match: re.Match[str]) -> None:
        if len(fields) >= 2000:
            return
        try:
            fields[match[1]] = _plain(match[1], json.loads(match[2]))
        except ValueError:
            return

    def _fields(self, stream: _Stream) -> None:
        fields, stream.fields = stream.fields or {}, None
        if fields.keys() >= _ARGUMENT_NAMES and stream.dumped is not None:
            self.out.append(ServerArgs(stream.dumped, fields, start=False))

    def _close_one(self, stream: _Stream) -> None:
        one, stream.one, stream.boxed = stream.one, None, False
        record = one.record() if one is not None else None
        if record is not None:
            self.out.append(record)

    def _close_cluster(self, stream: _Stream) -> None:
        cluster, stream.cluster = stream.cluster, None
        if cluster is not None:
            self.out.extend(cluster.records())

    def _close_native(self, stream: _Stream) -> None:
        native, stream.native = stream.native, None
        if native is not None:
            self.out.append(native.record())

    def _close(self, stream: _Stream) -> None:
        if stream.dump is not None:
            self._dumped(stream)
        if stream.fields is not None:
            self._fields(stream)
        self._close_native(stream)
        self._close_cluster(stream)
        self._close_one(stream)

    def finish(self) -> None:
        """Give out what is still open."""
        for stream in self.streams.values():
            self._close(stream)


def parse_events(lines: Iterable[LogLine]) -> Iterator[Event]:
    """Events in the order in which they end. One pass, bounded memory.

    A line that belongs to a traceback is part of that record and is not given out by itself.
    """
    parser = _Parser()
    out = parser.out
    for line in lines:
        parser.feed(line, line.number)
        if out:
            yield from out
            out.clear()
    parser.finish()
    yield from out
