"""How a log is wrapped: journal, containers, CI, a paste. Pure: a line in, what it says and who says it out.

Most wrappings tell themselves by the line alone (JSON, a timestamp of a container runtime, ``Nov 29 14:52:51 host
python[42]:``), so files of several kinds in a row are read line by line. Only what could be text as well is decided on
a sample: quoting, common indentation and ``name | `` of compose.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["NAMES", "WHEN", "Form", "Piece", "Speaker", "detect", "entry_piece", "unwrap"]

Speaker = Literal["process", "systemd", "kernel"]

NAMES = (
    *(
        "plain",
        "journal-json",
        "journal-short",
        "docker-json",
        "timestamps",
        "cri",
        "kubectl-prefix",
        "compose",
    ),
    *("dmesg", "own-jsonl", "json-lines", "actions", "quoted"),
)
"""Wrappings that :func:`unwrap` knows, ``plain`` being none."""

_DEEPEST = 4
_SAMPLE = 2000
_SUPPRESSED = "a596d6fe7bfa4994828e72309e95d61e"

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z| ?[+-]\d\d:?\d\d)"
_CONTAINER = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))(?: |$)")
_BRACKETED = re.compile(r"\[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))\](?: |$)")
"""Jenkins' timestamps; SGLang's own have no zone."""
_CRI = re.compile(r"(?:stdout|stderr) ([FP])(?::\S+)?(?: |$)")
WHEN = (
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?"
    rf"|{_STAMP}"
    r"|[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,9})? [A-Z+\-\d:]{1,8}"
    r"|\d{9,11}\.\d{6}"
    r"|\[ {0,9}\d{1,9}\.\d{3,9}\])"
)
_SHORT = re.compile(
    rf"({WHEN}) ([^\s\[\]:|]{{1,255}}) (?:([^\s:\[\]][^:\[\]\n]{{0,120}}?|\([^()\s]{{1,80}}\))\[(\d{{1,10}})\]|(kernel)): ?"
)
_INNER = re.compile(r"\[ {0,9}\d{1,9}\.\d{3,9}\] ")
_DMESG = re.compile(
    r"(?:<\d{1,3}>|[a-z0-9]{2,8} {0,4}:[a-z]{3,7} {0,3}: )?\[( {0,9}\d{1,9}\.\d{6}"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ?"
)
_POD = re.compile(r"\[(pod/[^\s\]/]{1,253}(?:/[^\s\]]{1,253})?)\] ?")
_RAY = re.compile(r"\(([\w.:<>-]{1,120}) pid=(\d{1,10})(?:, ip=[\d.:a-fA-F]{2,45})?\) ?")
_GH = re.compile(r"[^\t\n]{1,100}\t[^\t\n]{1,160}\t\ufeff?(?=\d{4}-\d\d-\d\dT)")
_ACTIONS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{7}Z ")
_COMPOSE = re.compile(r"((?:\d{1,4}\|)?[A-Za-z0-9][\w./-]{0,127}) {0,60}\| ?")
_SURE = r"(?:\x1b\[|\[20\d\d-\d\d-\d\d |INFO: |Traceback \(most recent|\d{4}-\d\d-\d\dT\d\d:|\{\"|[A-Z][a-z]{2} [ \d]\d \d\d:)"
_COMPOSE_SURE = re.compile(_COMPOSE.pattern + _SURE)
_QUOTE = re.compile(r" {0,3}>(?: |$)?(?:> ?)*")
_QUOTE_SURE = re.compile(r" {0,3}> ?(?:> ?)*" + _SURE.replace(r"\{\"", r"\{\"|  File \""))
_FENCE = re.compile(r"\s*(?:```|~~~)[\w.+-]{0,20}\s*$")
_FRAMES = re.compile(r" *(?:File \"|Traceback \(most|During handling of the above|The above exception)")
_NUMBER = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one line says once it is unwrapped.

    :param text: the program's own text; several lines where an entry had several.
    :param time: as the wrapping has it; ISO 8601 in UTC for a journal's JSON.
    :param host: machine, pod or container.
    :param name: program (syslog identifier) or container, for telling programs apart.
    :param unit: systemd unit that wrote it, or that systemd speaks of.
    :param command: executable or command line, where known.
    :param stream: key that joins the pieces of a text that was split; empty where none ever is.
    :param more: it goes on in the next piece with the same key.
    :param raw: the text was not readable as it stood (a list of bytes).
    :param damaged: the text, or a part of it, is missing.
    :param kind: the outermost wrapping, one of :data:`NAMES`.
    """

    text: str
    time: str = ""
    source: Speaker = "process"
    pid: int | None = None
    host: str = ""
    name: str = ""
    unit: str = ""
    command: str = ""
    stream: str = ""
    more: bool = False
    raw: bool = False
    damaged: bool = False
    kind: str = "plain"


@dataclass(frozen=True)
class Form:
    """What a sample says of a whole log.

    :param name: the wrapping most lines have.
    :param quoted: lines begin with ``> ``.
    :param indent: columns to be taken off every line that has them.
    :param fenced: there are lines of nothing but three backquotes.
    :param names: containers of ``name | `` lines; :func:`unwrap` adds to them.
    """

    name: str = "plain"
    quoted: bool = False
    indent: int = 0
    fenced: bool = False
    names: set[str] = field(default_factory=set)


def detect(lines: Iterable[str]) -> Form:
    """The form of a log, by its first lines (:data:`_SAMPLE` at most are looked at)."""
    sample = [line for line, _ in zip(lines, range(_SAMPLE), strict=False) if line.strip()]
    bare = [line for line in sample if not _FENCE.match(line)]
    quoted = _many(bare, _QUOTE) or any(_QUOTE_SURE.match(line) for line in bare)
    if quoted:
        sample = [_QUOTE.sub("", line, count=1) for line in sample]
    fenced = any(_FENCE.match(line) for line in sample)
    sample = [line for line in sample if line.strip() and not _FENCE.match(line)]
    indent = _indent(sample)
    sample = [line[indent:] for line in sample]
    names: set[str] = set()
    if _many(sample, _COMPOSE):
        found = Counter(match[1] for line in sample if (match := _COMPOSE.match(line)))
        names.update(name for name, _ in found.most_common(64))
    form = Form("plain", quoted, indent, fenced, names)
    kinds = Counter(_peeled(line, form).kind for line in sample)
    name = kinds.most_common(1)[0][0] if kinds else "plain"
    return replace(form, name="quoted" if quoted else name)


def _many(sample: Sequence[str], pattern: re.Pattern[str]) -> bool:
    return bool(sample) and 2 * sum(pattern.match(line) is not None for line in sample) > len(sample)


def _indent(sample: Sequence[str]) -> int:
    """Common indentation; what makes a frame of a traceback a frame is left in its place."""
    if not sample:
        return 0
    indent = min(len(line) - len(line.lstrip(" \t")) for line in sample)
    if not indent:
        return 0
    least = [line for line in sample if not line[indent : indent + 1].isspace()]
    if all(_FRAMES.match(line) and "File" in line[:300] for line in least):
        return max(indent - 2, 0)
    return indent


def unwrap(line: str, form: Form) -> Piece | None:
    """What ``line`` says; None where it says nothing (a fence, the runtime's own record without text)."""
    if form.quoted and (quote := _QUOTE.match(line)):
        line = line[quote.end() :]
    if form.indent:
        line = line[min(form.indent, len(line) - len(line.lstrip(" \t"))) :]
    if form.fenced and _FENCE.match(line):
        return None
    return _peeled(line, form)


def _peeled(line: str, form: Form, depth: int = 0) -> Piece:
    """Wrappings taken off from the outside in; the first character decides which are tried."""
    first = line[:1]
    if first == "[":
        if line.startswith("[20"):
            found = _BRACKETED.match(line)
            if found is None:
                return Piece(line)
            return _inner(line[found.end() :], form, depth, "timestamps", time=found[1])
        if line.startswith("[pod/") and (found := _POD.match(line)):
            name = found[1]
            return _inner(
                line[found.end() :], form, depth, "kubectl-prefix", host=name, name=name.rpartition("/")[2]
            )
        return _short(line) or _dmesg(line) or Piece(line)
    if first == "{":
        return _json(line, form, depth) or Piece(line)
    if first.isdigit():
        return _stamped(line, form, depth)
    if first == "\ufeff":
        return _peeled(line[1:], form, depth)
    if first == "(" and (found := _RAY.match(line)):
        piece = _inner(line[found.end() :], form, depth, "plain", name=found[1])
        return replace(piece, pid=int(found[2]))
    if first.isalpha() and first.isascii():
        if first.isupper() and (short := _short(line)):
            return short
        if "\t" in line[:100] and (found := _GH.match(line)):
            return _inner(line[found.end() :], form, depth, "actions")
        if " | " in line[:260] or "| " in line[:192]:
            return _composed(line, form, depth) or Piece(line)
        if first.islower() and line[:12].find(":") > 0:
            return _sse(line, form, depth) or _dmesg(line) or Piece(line)
    elif first == "<":
        return _dmesg(line) or Piece(line)
    elif first == "\x1e":
        return _peeled(line[1:], form, depth)
    elif first == "\x1b" and "|" in line[:260]:
        return _composed(re.sub(r"\x1b\[[\d;]*m", "", line), form, depth) or Piece(line)
    return Piece(line)


def _inner(
    line: str, form: Form, depth: int, kind: str, *, time: str = "", host: str = "", name: str = ""
) -> Piece:
    piece = _peeled(line, form, depth + 1) if depth < _DEEPEST else Piece(line)
    return replace(
        piece,
        time=piece.time or time,
        host=piece.host or host,
        name=piece.name or name,
        stream=f"{host}:{piece.stream}" if piece.stream and host else piece.stream,
        kind=kind if kind != "plain" else piece.kind,
    )


def _stamped(line: str, form: Form, depth: int) -> Piece:
    """A line that begins with a digit: nearly always a time."""
    found = _CONTAINER.match(line)
    if found is None:
        return _short(line) or _composed(line, form, depth) or Piece(line)
    when, rest = found[1], line[found.end() :]
    if when[19:20] == ",":
        return Piece(rest, when, "kernel", kind="dmesg")
    if (short := _short(line)) is not None:
        return short
    cri = _CRI.match(rest)
    if cri is not None:
        piece = _inner(rest[cri.end() :], form, depth, "cri", time=when)
        return replace(piece, stream=f"cri {rest[:6]}", more=cri[1] == "P")
    return _inner(rest, form, depth, "actions" if _ACTIONS.match(line) else "timestamps", time=when)


def _composed(line: str, form: Form, depth: int) -> Piece | None:
    found = _COMPOSE.match(line)
    if found is None:
        return None
    name = found[1]
    if name not in form.names:
        if not _COMPOSE_SURE.match(line) or len(form.names) >= 64:
            return None
        form.names.add(name)
    return _inner(line[found.end() :], form, depth, "compose", host=name, name=name)


def _short(line: str) -> Piece | None:
    """``journalctl -o short`` and its kin, and what syslog daemons write."""
    found = _SHORT.match(line)
    if found is None:
        return None
    when, host, name, pid, kernel = found.groups()
    text = line[found.end() :]
    if kernel or name == "kernel":
        inner = _INNER.match(text)
        text = text[inner.end() :] if inner else text
        return Piece(text, when, "kernel", None, host, "kernel", kind="journal-short")
    systemd = (name == "systemd" and pid == "1") or name == "init.scope"
    unit = name if name.endswith((".service", ".scope")) and not systemd else ""
    return Piece(
        text, when, "systemd" if systemd else "process", int(pid), host, name, unit, kind="journal-short"
    )


def _dmesg(line: str) -> Piece | None:
    found = _DMESG.match(line)
    if found is None:
        return None
    return Piece(line[found.end() :], found[1].strip(), "kernel", kind="dmesg")


def _sse(line: str, form: Form, depth: int) -> Piece | None:
    return _json(line[6:], form, depth) if line.startswith("data: {") else None


def _json(line: str, form: Form, depth: int) -> Piece | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return _torn(line)
    if not isinstance(found, dict):
        return None
    if "MESSAGE" in found or "__REALTIME_TIMESTAMP" in found or "__CURSOR" in found:
        return entry_piece(found)
    log = found.get("log")
    if isinstance(log, str):
        when = _word(found.get("time") or found.get("@timestamp") or found.get("timestamp"))
        stream = _word(found.get("stream"))
        if stream in ("stdout", "stderr"):
            return Piece(
                log.removesuffix("\n"),
                when,
                stream=f"docker {stream}",
                more=not log.endswith("\n"),
                kind="docker-json",
            )
        return Piece(log.removesuffix("\n"), when, kind="json-lines")
    message = found.get("message")
    if (
        isinstance(message, str)
        and found.get("source") in ("process", "systemd", "kernel")
        and "pid" in found
    ):
        pid = found["pid"]
        return Piece(
            message,
            _iso(_word(found.get("time"))),
            found["source"],
            pid if isinstance(pid, int) else None,
            kind="own-jsonl",
        )
    for key in ("message", "msg", "line", "textPayload"):
        if isinstance(found.get(key), str):
            when = next(
                (_word(found[name]) for name in ("time", "timestamp", "@timestamp", "ts") if name in found),
                "",
            )
            return Piece(found[key].removesuffix("\n"), when, kind="json-lines")
    return None


_LENIENT = json.JSONDecoder(strict=False)
_MESSAGE = re.compile(r'"(?:MESSAGE|log|message)" ?: ?"')


def _torn(line: str) -> Piece | None:
    """The text of a record that was cut off in the middle."""
    found = _MESSAGE.search(line)
    if found is None:
        return None
    kind = "journal-json" if "MESSAGE" in found[0] else "json-lines"
    rest = line[found.end() :]
    for text in (rest, rest[:-1], rest[:-5], rest[:-11]):
        try:
            return Piece(_LENIENT.raw_decode(f'"{text}"')[0], damaged=True, kind=kind)
        except ValueError:
            continue
    return None


def _word(value: Any) -> str:
    return value[:64] if isinstance(value, str) else str(value)[:64] if isinstance(value, int | float) else ""


def _iso(when: str) -> str:
    """``2026-11-29 14:52:50+00:00`` as ``2026-11-29T14:52:50+00:00``."""
    return f"{when[:10]}T{when[11:]}" if len(when) > 18 and when[10] == " " else when


def _bytes(value: Any) -> str:
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and {*map(type, value)} <= {int}
        and 0 <= min(value, default=0) <= max(value, default=0) < 256
    ):
        return bytes(value).decode("utf-8", "replace")
    return ""


def _text(value: Any) -> tuple[str, bool]:
    """Text of a journal field, several values joined by newlines, and whether it did not stand there as text."""
    if isinstance(value, str):
        return value, False
    if isinstance(value, list) and not {str, list}.isdisjoint(map(type, value)):
        return "\n".join(map(_bytes, value)), True
    return _bytes(value), True


def _integer(value: Any) -> int | None:
    text = _text(value)[0]
    return int(text) if _NUMBER.fullmatch(text) and text.isascii() else None


def entry_piece(found: Mapping[str, Any]) -> Piece:
    """An entry of ``journalctl -o json``, with what systemd and the kernel say told apart from processes.

    A message longer than journald's ``LineMax`` comes in pieces: ``stream`` joins them.
    """
    text, raw = _text(found.get("MESSAGE"))
    source: Speaker = "process"
    name = _text(found.get("SYSLOG_IDENTIFIER") or found.get("_COMM") or "")[0]
    if found.get("_TRANSPORT") == "kernel":
        source = "kernel"
    elif (
        "UNIT" in found
        or found.get("MESSAGE_ID") == _SUPPRESSED
        or (name == "systemd" and found.get("_PID") == "1")
    ):
        source = "systemd"
    unit = (
        found.get("OBJECT_SYSTEMD_UNIT")
        or found.get("UNIT" if source == "systemd" else "_SYSTEMD_UNIT")
        or ""
    )
    stream = found.get("_STREAM_ID")
    return Piece(
        text=text.rstrip("\n"),
        time=_moment(found.get("__REALTIME_TIMESTAMP")),
        source=source,
        pid=_integer(found.get("_PID")),
        host=_text(found.get("_HOSTNAME") or "")[0],
        name=name,
        unit=_text(unit)[0],
        command=_text(found.get("_CMDLINE") or found.get("_EXE") or "")[0][:4096],
        stream=f"journal {stream}" if isinstance(stream, str) else "",
        more=found.get("_LINE_BREAK") == "line-max" and isinstance(stream, str),
        raw=raw,
        damaged="MESSAGE" in found and found["MESSAGE"] is None,
        kind="journal-json",
    )


def _moment(value: Any) -> str:
    micros = _integer(value)
    if micros is None:
        return ""
    try:
        return (
            datetime.fromtimestamp(micros // 1_000_000, UTC)
            .replace(microsecond=micros % 1_000_000)
            .isoformat()
        )
    except (ValueError, OverflowError, OSError):
        return ""
