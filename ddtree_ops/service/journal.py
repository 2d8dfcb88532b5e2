"""Reading the journal: the command, its output as entries, and a search that says what it searched. Pure.

Two halves make up the story of a unit: what its processes printed (``_SYSTEMD_UNIT=``, ``_SYSTEMD_INVOCATION_ID=``)
and what systemd says about it (``UNIT=``, ``INVOCATION_ID=``). Both are asked for, always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ddtree_ops.errors import Inconclusive, UsageError
from ddtree_ops.secret import redact
from ddtree_ops.wording import moment_of

__all__ = [
    "Entries",
    "Entry",
    "EntryParser",
    "MessageId",
    "SearchResult",
    "journal_argv",
    "moment_of_when",
    "parse_entries",
    "parse_when",
    "raw_texts",
    "search",
]

Source = Literal["process", "systemd", "kernel"]


class MessageId:
    """``MESSAGE_ID`` of what systemd and journald say (``systemd/sd-messages.h``)."""

    STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
    STARTED = "39f53479d3a045ac8e11786248231fbf"
    START_FAILED = "be02cf6855d2428ba40df7e9d022f03d"
    STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
    STOPPED = "9d1aaa27d60140bd96365438aad20286"
    EXITED = "98e322203f7a4ed290d09fe03c09fe15"
    SUCCEEDED = "7ad2d189f7e94e70a38c781354912448"
    FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
    RESTART_SCHEDULED = "5eb03494b6584870a536b337290809b3"
    OUT_OF_MEMORY = "fe6faa94e7774663a0da52717891d8ef"
    SUPPRESSED = "a596d6fe7bfa4994828e72309e95d61e"


_INVOCATION = re.compile(r"[0-9a-f]{32}")
_RELATIVE = re.compile(
    r"(?:(\d+)d(?:ays?)?)?(?:(\d+)h(?:ours?|rs?|r)?)?(?:(\d+)m(?:inutes?|ins?|in)?)?(?:(\d+)s(?:econds?|ecs?|ec)?)?"
)
_NAMED_TIMES = ("now", "today", "yesterday")
_SUPPRESSED = re.compile(r"Suppressed (\d+) messages from (\S+)")
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_JOIN_LIMIT = 4 << 20


def parse_when(text: str) -> str:
    """A time for ``--since`` and ``--until`` in a form every journalctl reads, without spaces.

    Understood: ``2h``, ``90s``, ``1h30m``, ``10 minutes ago``, ``-2h`` (all counted back on the HOST's clock),
    ``now``, ``today``, ``yesterday``, ``@EPOCH``, and ISO 8601 (``2026-11-29``, ``2026-11-29 14:55``,
    ``2026-11-29T14:55:17+01:00``); without a zone that is UTC, as all times that ddtree-ops prints.

    :raises UsageError: for anything else.
    """
    plain = text.strip()
    if plain.lower() in _NAMED_TIMES:
        return plain.lower()
    if re.fullmatch(r"@\d+(\.\d+)?", plain):
        return plain
    if (moment := moment_of(plain)) is not None:
        return f"@{moment.timestamp():.6f}".rstrip("0").rstrip(".")
    span = re.sub(r"\s+ago$", "", plain.lower()).removeprefix("-")
    match = _RELATIVE.fullmatch(re.sub(r"\s+|\band\b|,", "", span))
    if match and any(match.groups()):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return f"-{days * 86400 + hours * 3600 + minutes * 60 + seconds}s"
    raise UsageError(
        f"{text!r} is not a time",
        hint="write 2h, 90s, '10 minutes ago', today, @EPOCH or 2026-11-29T14:55:17+00:00 (UTC without a zone)",
    )


def moment_of_when(text: str, *, now: datetime) -> datetime:
    """The same as a moment, counted from ``now`` where ``text`` is relative; days begin at midnight UTC.

    :raises UsageError: it is no time.
    """
    when = parse_when(text)
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    named = {"now": now, "today": midnight, "yesterday": midnight - timedelta(days=1)}
    if when in named:
        return named[when]
    try:
        if when.startswith("@"):
            return datetime.fromtimestamp(float(when[1:]), UTC)
        return now - timedelta(seconds=int(when[1:-1]))
    except (OverflowError, ValueError, OSError) as error:
        raise UsageError(f"{text!r} is no time in any calendar") from error


def journal_argv(
    unit: str,
    *,
    invocation: str | None = None,
    since: str | None = None,
    until: str | None = None,
    lines: int | None = None,
    follow: bool = False,
    after_cursor: str | None = None,
    kernel: bool = False,
) -> list[str]:
    """The ``journalctl`` command for both halves of a unit's journal.

    :param invocation: one run of the unit, the 32 hex digits of its ``InvocationID``; left out: all runs.
    :param since: a text :func:`parse_when` understands; ``until`` likewise.
    :param lines: the newest so many entries only.
    :param follow: keep waiting for new entries, after the ones selected.
    :param after_cursor: only what came after the entry with this cursor (safe against clock steps); where that entry is
        one of those selected it comes first, and is for :class:`EntryParser` to leave out: ``--after-cursor`` of
        systemd 252 leaves out the first one selected whatever it is.
    :param kernel: the kernel's messages too (out of memory, GPU ``Xid``); give ``since`` or a cursor with it.
    :raises UsageError: for a malformed time, invocation or count.
    """
    argv = ["journalctl", "--output=json", "--all", "--no-pager", "--quiet"]
    if since is not None:
        argv.append(f"--since={parse_when(since)}")
    if until is not None:
        argv.append(f"--until={parse_when(until)}")
    if after_cursor is not None:
        argv.append(f"--cursor={after_cursor}")
    if lines is not None:
        if lines < 0:
            raise UsageError(f"{lines} lines: must not be negative")
        argv.append(f"--lines={lines}")
    if follow:
        argv += ["--follow"] if lines is not None else ["--follow", "--no-tail"]
    dropped = f"MESSAGE_ID={MessageId.SUPPRESSED}"
    if invocation is None:
        argv += [f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}", "+", dropped, f"OBJECT_SYSTEMD_UNIT={unit}"]
    else:
        if not _INVOCATION.fullmatch(invocation):
            raise UsageError(f"{invocation!r} is not an invocation id (32 hex digits)")
        argv += [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
        argv += ["+", dropped, f"OBJECT_SYSTEMD_INVOCATION_ID={invocation}"]
    if kernel:
        argv += ["+", "_TRANSPORT=kernel"]
    return argv


@dataclass(frozen=True)
class Entry:
    """One journal entry.

    :param time: UTC, when journald received it, by the host's clock.
    :param message: text without line end; undecodable bytes replaced, progress bars reduced to their last state,
        terminal control sequences removed, secrets masked.
    :param priority: 0 (emergency) to 7 (debug), or None.
    :param invocation: ``InvocationID`` of the run that it belongs to, or empty.
    :param source: who speaks: the service's processes, systemd (or journald) about it, or the kernel.
    :param message_id: see :class:`MessageId`; empty for what processes print.
    :param fields: systemd's own words on jobs and ends: ``JOB_TYPE``, ``JOB_RESULT``, ``UNIT_RESULT``,
        ``EXIT_CODE``, ``EXIT_STATUS``, ``N_RESTARTS``, ``N_DROPPED`` where present.
    """

    time: datetime
    message: str
    priority: int | None
    pid: int | None
    ident: str
    unit: str
    invocation: str
    cursor: str
    source: Source
    host: str
    message_id: str
    fields: Mapping[str, str]


_KEPT_FIELDS = (
    "JOB_TYPE",
    "JOB_RESULT",
    "UNIT_RESULT",
    "EXIT_CODE",
    "EXIT_STATUS",
    "N_RESTARTS",
    "N_DROPPED",
)


def _raw(value: Any) -> bytes:
    """Bytes of a field: text, a list of byte values, or several values of one name (joined by newlines)."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(value)
        return b"\n".join(_raw(item) for item in value)
    raise ValueError(f"a journal field of type {type(value).__name__}")


def _text(value: Any) -> str:
    return _raw(value).decode("utf-8", "replace")


def _number(value: Any) -> int | None:
    text = _text(value)
    return int(text) if text.isascii() and text.isdigit() else None


def _message(raw: bytes) -> str:
    text = _CONTROL_SEQUENCE.sub("", raw.decode("utf-8", "replace"))
    if "\r" in text:
        states = [state for state in text.split("\r") if state.strip()]
        text = states[-1] if states else ""
    return redact(text.rstrip("\n"))


def _entry(found: Mapping[str, Any], message: bytes) -> Entry:
    micros = _number(found.get("__REALTIME_TIMESTAMP"))
    if micros is None:
        raise ValueError("no __REALTIME_TIMESTAMP")
    source: Source = "process"
    if _text(found.get("_TRANSPORT")) == "kernel":
        source = "kernel"
    elif "UNIT" in found or _text(found.get("MESSAGE_ID")) == MessageId.SUPPRESSED:
        source = "systemd"
    names = ("UNIT", "INVOCATION_ID") if "UNIT" in found else ("_SYSTEMD_UNIT", "_SYSTEMD_INVOCATION_ID")
    return Entry(
        time=datetime.fromtimestamp(micros // 1_000_000, UTC).replace(microsecond=micros % 1_000_000),
        message=_message(message),
        priority=_number(found.get("PRIORITY")),
        pid=_number(found.get("_PID")),
        ident=_text(found.get("SYSLOG_IDENTIFIER")),
        unit=_text(found.get("OBJECT_SYSTEMD_UNIT") or found.get(names[0])),
        invocation=_text(found.get("OBJECT_SYSTEMD_INVOCATION_ID") or found.get(names[1])),
        cursor=_text(found.get("__CURSOR")),
        source=source,
        host=_text(found.get("_HOSTNAME")),
        message_id=_text(found.get("MESSAGE_ID")),
        fields={name: _text(found[name]) for name in _KEPT_FIELDS if name in found},
    )


class EntryParser:
    """Incremental parser of ``journalctl -o json``: feed bytes cut anywhere, get entries.

    A line of output longer than journald's ``LineMax`` (48 KiB), which it splits, is put together again.

    :param after_cursor: as given to :func:`journal_argv`: the entry with this cursor is left out.
    :param known: further cursors whose entries are left out: those of :attr:`ahead` of an earlier parser.
    :param holding: only entries whose message may hold one of these texts (ASCII, see :func:`raw_texts`) are made;
        the others are counted in :attr:`passed` without being parsed, which is ten times as fast. What an entry
        really holds is for the caller to see. None: all.
    :ivar damaged: lines so far that are no journal entry, or whose message journalctl withheld. They cannot be
        searched: a verdict that rests on "nothing found" must look at this.
    :ivar passed: entries that ``holding`` left out; ``first_us`` and ``last_us``: of them the earliest and the latest,
        microseconds since the epoch by the host's clock, 0 without any.
    :ivar resume: cursor behind which a later parser goes on without losing an entry; None before the first one.
    :ivar ahead: cursors of entries behind :attr:`resume` that were given out already (there are such while a split
        line waits for its rest).
    """

    def __init__(
        self,
        *,
        after_cursor: str | None = None,
        known: Iterable[str] = (),
        holding: Sequence[bytes] | None = None,
    ) -> None:
        self.damaged = 0
        self.passed = self.first_us = self.last_us = 0
        self.resume = after_cursor
        self.ahead: set[str] = set(known)
        self._after = after_cursor
        self._known = frozenset(self.ahead)
        self._needed = None if holding is None else (*_ALWAYS_PARSED, *holding)
        self._rest: list[bytes] = []
        self._split: dict[str, tuple[Mapping[str, Any], list[bytes]]] = {}

    def feed(self, chunk: bytes) -> list[Entry]:
        """Entries completed by ``chunk``."""
        *lines, rest = chunk.split(b"\n")
        if not lines:
            self._rest.append(rest)
            return []
        lines[0] = b"".join((*self._rest, lines[0]))
        self._rest = [rest] if rest else []
        return [entry for line in lines for entry in self._line(line)]

    def close(self) -> list[Entry]:
        """What is left at the end of the output: a last line without newline, halves of a split line."""
        entries = list(self._line(b"".join(self._rest)))
        self._rest = []
        return [*entries, *self._flush()]

    def _flush(self) -> list[Entry]:
        halves, self._split = list(self._split.values()), {}
        return [entry for first, parts in halves for entry in self._make(first, b"".join(parts))]

    def _make(self, found: Mapping[str, Any], message: bytes) -> list[Entry]:
        try:
            return [_entry(found, message)]
        except (ValueError, OverflowError):
            self.damaged += 1
            return []

    def _passes(self, line: bytes) -> bool:
        """The line needs no parsing: nothing that is asked for is in it. It is counted."""
        if self._needed is None or self._split or not line.endswith(b"}"):
            return False
        if any(text in line for text in self._needed):
            return False
        place = line.find(_STAMP) + len(_STAMP)
        stamp = line[place : line.find(b'"', place)] if place >= len(_STAMP) else b""
        if not stamp.isdigit():
            return False
        micros = int(stamp)
        self.passed += 1
        self.first_us = min(self.first_us, micros) if self.first_us else micros
        self.last_us = max(self.last_us, micros)
        return True

    def _line(self, line: bytes) -> list[Entry]:
        if not line.strip() or self._passes(line):
            return []
        try:
            found = json.loads(line)
            cursor = found.get("__CURSOR")
            if self._after is not None and cursor == self._after:
                return []
            message = _raw(found.get("MESSAGE"))
        except (ValueError, AttributeError, RecursionError, TypeError):
            self.damaged += 1
            return []
        if "MESSAGE" in found and found["MESSAGE"] is None:
            self.damaged += 1
        entries = self._whole(found, message)
        if self._known and cursor in self._known:
            entries = []
        if isinstance(cursor, str):
            if not self._split:
                self.resume = cursor
                self.ahead.clear()
            elif entries:
                self.ahead.update(entry.cursor for entry in entries)
                if len(self.ahead) >= _AHEAD_LIMIT:
                    entries += self._flush()
                    self.resume = cursor
                    self.ahead.clear()
        return entries

    def _whole(self, found: Mapping[str, Any], message: bytes) -> list[Entry]:
        stream = found.get("_STREAM_ID")
        if not isinstance(stream, str):
            return self._make(found, message)
        first, parts = self._split.pop(stream, (found, []))
        parts.append(message)
        if found.get("_LINE_BREAK") == "line-max" and sum(map(len, parts)) < _JOIN_LIMIT:
            self._split[stream] = (first, parts)
            return []
        return self._make(
            {**found, "__REALTIME_TIMESTAMP": first.get("__REALTIME_TIMESTAMP")}, b"".join(parts)
        )


_STAMP = b'"__REALTIME_TIMESTAMP":"'
_ALWAYS_PARSED = (b'"MESSAGE":[', b'"MESSAGE":null', b'"_LINE_BREAK":"line-max"', b"Suppressed ")
_AHEAD_LIMIT = 4096
_NEVER_RAW = frozenset('"\\*')


def raw_texts(pattern: str, *, literal: bool = False) -> tuple[bytes, ...] | None:
    """Texts of which every message that ``pattern`` matches holds at least one; None where that is not plain to see.

    For :class:`EntryParser`: they stand in journalctl's output as they stand in the message, which is so for printable
    ASCII without quotes and backslashes (bytes that are no printable UTF-8 come as lists, which are always parsed).

    :param literal: the pattern is plain text; else plain words and alternatives of them (``Traceback|CUDA``) are seen.
    """
    texts = [pattern] if literal else pattern.split("|")
    special = _NEVER_RAW if literal else _NEVER_RAW | frozenset(".^$+?{}[]()")
    if any(not text or not text.isascii() or not text.isprintable() or special & {*text} for text in texts):
        return None
    return tuple(text.encode() for text in texts)


class Entries(Iterator[Entry]):
    """Entries as they come; :attr:`damaged` counts what could not be read so far."""

    def __init__(
        self,
        chunks: Iterable[bytes],
        *,
        after_cursor: str | None = None,
        holding: Sequence[bytes] | None = None,
    ) -> None:
        self.parser = EntryParser(after_cursor=after_cursor, holding=holding)
        self._chunks = chunks
        self._entries: Generator[Entry, None, None] = self._run(chunks)

    def _run(self, chunks: Iterable[bytes]) -> Generator[Entry, None, None]:
        for chunk in chunks:
            yield from self.parser.feed(chunk)
        yield from self.parser.close()

    @property
    def damaged(self) -> int:
        """See :attr:`EntryParser.damaged`."""
        return self.parser.damaged

    def __next__(self) -> Entry:
        return next(self._entries)

    def close(self) -> None:
        """End it, on the host too: no further entry comes."""
        self._entries.close()
        if isinstance(self._chunks, Generator):
            self._chunks.close()


def parse_entries(
    chunks: Iterable[bytes], *, after_cursor: str | None = None, holding: Sequence[bytes] | None = None
) -> Entries:
    """Entries of ``journalctl -o json`` output that arrives in chunks cut anywhere; see :class:`EntryParser`."""
    return Entries(chunks, after_cursor=after_cursor, holding=holding)


@dataclass(frozen=True)
class SearchResult:
    """What a search saw. Times are UTC.

    :param searched: entries looked at (never 0: that raises instead).
    :param suppressed: messages that journald itself dropped (rate limit): they were never written anywhere.
    :param damaged: lines of output that could not be read.
    :param literal: entries that hold the pattern as plain text, where it was read as a regular expression.
    """

    searched: int
    first: datetime
    last: datetime
    matches: tuple[Entry, ...]
    suppressed: int
    damaged: int
    literal: int = 0

    @property
    def complete(self) -> bool:
        """Nothing is known to be missing: only then does "no match" mean that the text was not there."""
        return not self.suppressed and not self.damaged

    def describe(self) -> str:
        """One line: how many entries from when to when, and what is known to be missing."""
        text = (
            f"searched {self.searched} journal entries from {self.first.isoformat(' ', 'seconds')} "
            f"to {self.last.isoformat(' ', 'seconds')}: "
            + (f"{len(self.matches)} match" if self.matches else "none matches")
        )
        if self.suppressed:
            text += (
                f"; journald had suppressed {self.suppressed} messages (rate limit), which nobody can search"
            )
        if self.damaged:
            text += f"; {self.damaged} entries could not be read"
        if self.literal and not self.matches:
            text += f"; {self.literal} hold it as plain text: add --fixed-strings"
        return text


def search(
    entries: Iterable[Entry],
    pattern: str | None,
    *,
    ignore_case: bool = False,
    literal: bool = False,
    damaged: int | Callable[[], int] = 0,
    what: str = "the journal",
) -> SearchResult:
    """Search messages with Python's ``re`` (``journalctl --grep`` may be compiled out, and guesses at case).

    :param pattern: a regular expression, searched anywhere in the message; None matches every entry.
    :param literal: the pattern is plain text, no regular expression.
    :param damaged: unreadable lines, where ``entries`` is not an :class:`Entries` that knows by itself.
    :param what: named in the error where nothing was readable.
    :raises UsageError: for a bad regular expression.
    :raises Inconclusive: without a single readable entry: that is no "nothing found".
    """
    try:
        text = re.escape(pattern or "") if literal else pattern or ""
        regexp = re.compile(text, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a regular expression: {error}",
            hint="for plain text add --fixed-strings",
        ) from error
    searched = suppressed = 0
    first: datetime | None = None
    last: datetime | None = None
    matches: list[Entry] = []
    as_text = 0
    for entry in entries:
        searched += 1
        first = entry.time if first is None or entry.time < first else first
        last = entry.time if last is None or entry.time > last else last
        if entry.message_id == MessageId.SUPPRESSED or entry.source != "process":
            dropped = _SUPPRESSED.match(entry.message)
            if dropped:
                suppressed += int(dropped.group(1))
        if regexp.search(entry.message):
            matches.append(entry)
        elif pattern and pattern in entry.message:
            as_text += 1
    if isinstance(entries, Entries):
        lost = entries.damaged
    else:
        lost = damaged() if callable(damaged) else damaged
    if first is None or last is None:
        raise Inconclusive(
            f"{what}: no readable entry" + (f", {lost} damaged ones" if lost else ""),
            hint="check, in this order: does the unit exist, did it ever run in the time asked for, may we read the "
            "system journal (root or group systemd-journal), was it rotated away (journalctl --header), is it "
            "volatile (lost at a reboot without /var/log/journal)",
        )
    return SearchResult(searched, first, last, tuple(matches), suppressed, lost, as_text)
