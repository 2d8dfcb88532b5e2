"""Which lines of a log need a closer look: one pass of RE2 over whole chunks, and regions around what it finds.

Nearly all of a serving log is batch and access lines, which :class:`Counter` reads from the raw chunks. A line is hot
where it holds a text that can begin or belong to an event (:data:`TOKENS`, phases, a literal of a signature); with it
go lines before and after, up to the next line that shows the server alive. The beginning and the end of the log
always go along. What the parser gets is a part of the log, each line with its true number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import re2

from ddtree_ops.diagnose.lines import LogLine, Reader, uncoloured
from ddtree_ops.diagnose.regex import compile_bytes
from ddtree_ops.diagnose.source import MAX_LINE

__all__ = ["EDGE", "TOKENS", "Counter", "Sifted", "any_text", "lines_back", "sift"]

EDGE = 64
"""Lines at the beginning and at the end of a log that are always read."""

_BEFORE, _AFTER = 8, 40
_AROUND = 2
_CROWDED = 256
_STRETCH = 128 << 10

_RECORDS = (
    *("Traceback", '  File "', "rror", "xception", "most recent call", "terminate called", "what():"),
    *("Segmentation", "Aborted", "core dumped", "panicked", "frame #", "SIG", "Assert", "assert", "FAILED:"),
    *("Fatal", "fatal", "FATAL", "Failed", "failed", "C++", "Interrupt", "SystemExit", "Killed", "killed"),
    *("Current thread 0x", "Thread 0x", "backtrace", "Backtrace", "[-h]", "*** "),
)
"""Texts of a record that may have many lines, before and after."""

_SINGLES = (
    *(
        "ServerArgs(",
        "server_args",
        "% Completed |",
        "Capturing",
        "Capture ",
        "Load weight",
        "KV Cache is allocated",
    ),
    *(
        "Init torch distributed",
        "Memory pool end",
        "draft runner",
        "max_total_num_tokens=",
        "Started server process",
    ),
    *("Uvicorn running", "Running warmup", "warmup", "fired up and ready", "SIGTERM", "Gracefully exiting"),
    *(
        "Shutting down",
        "hit an exception",
        "crash",
        "died",
        "exit code",
        "exited",
        "out of memory",
        "Out of memory",
    ),
    *(
        "OOM",
        "oom-kill",
        "Xid",
        "NVRM",
        "AER",
        "timed out",
        "timeout",
        "Timeout",
        "Suppressed ",
        "memory leak",
    ),
    *(
        "Retract",
        "retract",
        "SGLANG_SIMULATE",
        "SGL_",
        "not supported",
        "Unsupported",
        "unsupported",
        "!!!!!!",
    ),
    *("watchdog", "Watchdog", "Warning:", "WARNING", "CRITICAL", "ERROR", "ncclInternal", "NCCL", "Signal "),
    *('"UNIT":', '"_TRANSPORT":"kernel"', '"_TRANSPORT": "kernel"', '"_LINE_BREAK"', '"source": "systemd"'),
    *('"MESSAGE":[', '"MESSAGE": [', '"MESSAGE":null', '"MESSAGE": null', '"source": "kernel"'),
    *("launch_server", "sglang serve", "--speculative-"),
    *(" systemd[1]: ", " kernel: ", "init.scope[1]: ", "stdout P ", "stderr P "),
)
"""Texts of a line that stands alone."""

TOKENS = (*_RECORDS, *_SINGLES)

_UNENDED = rb'(?:[^n"\\]|[^\\]n)", ?"stream": ?"std'
"""docker's json-file: a record whose text does not end in a newline goes on in the next."""

_DMESG = rb"(?m:^\[ {0,9}\d{1,9}\.\d{6}\] )"
_MESSAGE = re.compile(rb'"MESSAGE" ?: ?"((?:[^"\\]|\\.)*)"')
_SPEAKER = re.compile(rb'"UNIT":|"_TRANSPORT": ?"kernel"|"_LINE_BREAK"|"MESSAGE": ?(?:\[|null)')
_REQUEST = re.compile(rb"\[20[^\]\n]{17,80}\] (?:Receive|Finish): obj=")
_ALIVE = rb'Prefill batch|Decode batch|HTTP/1\.[01]\\?" 2\d\d'
_SERVES = rb'Prefill batch|Decode batch|"POST [^ "\\]{1,200} HTTP/1\.[01]\\?" 2\d\d'
_PREFIX = rb"\[20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d"


class Counter(Protocol):
    """What is fed with everything: :class:`ddtree_ops.diagnose.figures.Tally`."""

    def feed(self, chunk: bytes, *, lines: int | None = None) -> None:
        """Whole lines, in whatever wrapping, without colours; ``lines`` newlines in it, where they were counted."""

    def feed_text(self, text: str, time: str) -> None:
        """A text that the raw lines do not show."""


@lru_cache(maxsize=4096)
def _either(text: str) -> str:
    """A pattern that finds ``text`` as it stands and as JSON writes it, in Latin-1 for its UTF-8 bytes."""
    parts = []
    for char in text:
        plain = re2.escape(char.encode("utf-8")).decode("latin-1")
        if char in '<>&"\\/\t' or not char.isascii():
            units = char.encode("utf-16-be", "surrogatepass")
            written = "".join(rf"\\u(?i:{units[at : at + 2].hex()})" for at in range(0, len(units), 2))
            short = {'"': r'\\"', "\\": r"\\\\", "/": r"\\/", "\t": r"\\t"}.get(char)
            plain = f"(?:{plain}|{written}{'|' + short if short else ''})"
        parts.append(plain)
    return "".join(parts)


def any_text(given: Iterable[str], *, escaped: bool = True) -> bytes:
    """An RE2 pattern, in Latin-1, that finds any of the texts in raw lines (of several lines the longest).

    :param escaped: also as JSON writes them.
    """
    texts = {max(text.split("\n"), key=len) for text in given} - {""}
    if not escaped:
        return b"|".join(re2.escape(text.encode("utf-8")) for text in sorted(texts))
    return "|".join(map(_either, sorted(texts))).encode("latin-1")


def lines_back(data: bytes, place: int, lines: int, floor: int) -> int:
    """Begin of the line so many lines before the one that begins at ``place``, but not before ``floor``."""
    for _ in range(lines):
        if place <= floor:
            break
        place = data.rfind(b"\n", 0, place - 1) + 1
    return max(place, floor)


class Sifted(Iterator[LogLine]):
    """The lines worth parsing, in the order of the log.

    :ivar lines: lines of the log so far, all of them.
    :ivar parsed: of these, read one by one.
    :ivar format: wrapping of the log, one of :data:`ddtree_ops.diagnose.formats.NAMES`; empty before anything was read.
    :ivar others: lines left out because another program of the machine wrote them.
    :ivar damaged: journal entries whose text journalctl withheld, and JSON lines that could not be read.
    :ivar truncated: why something of the input is missing; empty where nothing is known to be.
    """

    def __init__(self, chunks: Iterable[bytes], literals: Sequence[str], tally: Counter) -> None:
        self.lines = 0
        self.parsed = 0
        self._chunks = chunks
        self._hot = compile_bytes(b"|".join((any_text([*TOKENS, *literals]), _UNENDED, _DMESG)))
        self._record = compile_bytes(any_text([*_RECORDS, *literals]))
        self._awaited = {
            "alive": compile_bytes(_ALIVE),
            "serves": compile_bytes(_SERVES),
            "prefix": compile_bytes(_PREFIX),
        }
        self._tally = tally
        self._reader: Reader | None = None
        self._found = self._run()

    def __next__(self) -> LogLine:
        return next(self._found)

    @property
    def format(self) -> str:
        return self._reader.form.name if self._reader else ""

    @property
    def others(self) -> int:
        return self._reader.others if self._reader else 0

    @property
    def damaged(self) -> int:
        return self._reader.damaged if self._reader else 0

    @property
    def truncated(self) -> str:
        return str(getattr(self._chunks, "truncated", ""))

    def _run(self) -> Iterator[LogLine]:
        window = _Window()
        owed, due = EDGE, {"prefix"}
        for raw in self._chunks:
            chunk = uncoloured(raw)
            if self._reader is None:
                self._reader = Reader(chunk, self._tally.feed_text)
            texts = self._reader.form.name == "journal-json"
            if texts:
                self._tally.feed(chunk)
            before_it = window.newlines
            window.push(chunk)
            awaited = {name: _Next(pattern, window.data) for name, pattern in self._awaited.items()}
            end, owed = window.after(window.fresh, owed)
            yield from self._read(window, window.fresh, end)
            hits = self._hits(window)
            hit = next(hits, None)
            while True:
                wanted = {name: place for name in due if (place := awaited[name].at(window.done)) is not None}
                first = min(wanted.values(), default=None)
                if first is not None and (hit is None or first < hit[0]):
                    start = window.begin_of(first)
                    end, _ = window.after(start, 1)
                    due -= {name for name, place in wanted.items() if place < end}
                    yield from self._read(window, start, end)
                    continue
                if hit is None:
                    break
                start, end, before, after = hit
                begin = window.before(start, before)
                until, missing = window.after(end, after)
                while (hit := next(hits, None)) is not None and window.before(hit[0], hit[2]) <= until:
                    until, missing = max((until, missing), window.after(hit[1], hit[3]))
                yield from self._read(window, begin, until)
                owed = max(owed, missing)
                due |= {"alive", "serves"}
            window.keep()
            if not texts:
                self._tally.feed(chunk, lines=window.newlines - before_it)
            self.lines = window.newlines + (not window.data.endswith(b"\n") and bool(window.data))
        if self._reader is not None:
            stamped = window.stamped
            if stamped is not None and window.given < stamped[0] < window.first_kept:
                yield from self._reader.line(stamped[1], stamped[0])
            yield from self._read(window, 0, len(window.data))
            yield from self._reader.close()

    def _hits(self, window: _Window) -> Iterator[tuple[int, int, int, int]]:
        """Hot lines of the fresh part: begin, end (behind the newline), lines wanted before and after.

        Where most lines are hot, stretches are taken as a whole: looking at each costs more than it spares.
        """
        data, at = window.data, window.fresh
        size, begun, count = len(data), at, 0
        while at < size:
            found = self._hot.search(data, at)
            if found is None:
                return
            start = data.rfind(b"\n", 0, found.start()) + 1
            end = data.find(b"\n", found.end())
            at = end = size if end < 0 else end + 1
            line = data[start:end]
            if line.startswith(b"{") and not self._meant(line, found.start() - start):
                continue
            if b": obj=" in line[:2048] and _REQUEST.search(line[:2048]):
                continue
            record = self._record.search(line) is not None
            yield start, end, *((_BEFORE, _AFTER) if record else (_AROUND, _AROUND))
            count += 1
            if count == _CROWDED:
                if end - begun < _CROWDED * 512:
                    stop = data.rfind(b"\n", end, end + _STRETCH) + 1
                    at = stop or end
                    if stop:
                        yield end, stop, 0, _AFTER
                count, begun = 0, at

    def _meant(self, line: bytes, place: int) -> bool:
        """Whether what was found at ``place`` of a journal entry is in its message, or says who speaks."""
        message = _MESSAGE.search(line)
        if message is None or message.start(1) <= place < message.end(1) or _SPEAKER.search(line):
            return True
        return self._hot.search(message[1]) is not None

    def _read(self, window: _Window, start: int, end: int) -> Iterator[LogLine]:
        reader = self._reader
        if reader is None or end <= start:
            return
        for number, raw in window.take(start, end):
            self.parsed += 1
            yield from reader.line(raw, number)


class _Next:
    """The next match at or behind a place; places only grow, so all questions together read the data once."""

    def __init__(self, pattern: Any, data: bytes) -> None:
        self._pattern = pattern
        self._data = data
        self._found: int | None = -1

    def at(self, place: int) -> int | None:
        if self._found is not None and self._found < place:
            found = self._pattern.search(self._data, place)
            self._found = None if found is None else found.start()
        return self._found


class _Window:
    """The chunk at hand, with the last lines of the one before in front of it.

    :ivar fresh: where the new chunk begins in :attr:`data`.
    :ivar done: up to where lines were given out.
    """

    def __init__(self) -> None:
        self.data = b""
        self.fresh = 0
        self.done = 0
        self.given = 0
        self.stamped: tuple[int, bytes] | None = None
        self.first_kept = 1
        self._number = 1
        self._counted = 0

    @property
    def newlines(self) -> int:
        """Newlines read so far."""
        return self._number - 1 + self.data.count(b"\n", self._counted)

    def push(self, chunk: bytes) -> None:
        self.fresh = len(self.data)
        self.data += chunk

    def begin_of(self, place: int) -> int:
        return self.data.rfind(b"\n", 0, place) + 1

    def before(self, start: int, lines: int) -> int:
        """Begin of the line so many lines before, not further than what was given out."""
        return lines_back(self.data, start, lines, self.done)

    def after(self, end: int, lines: int) -> tuple[int, int]:
        """End of the line so many lines after, and how many of these the data does not have yet."""
        for left in range(lines, 0, -1):
            found = self.data.find(b"\n", end)
            if found < 0:
                return len(self.data), left - (end < len(self.data))
            end = found + 1
        return end, 0

    def take(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Lines between two places that were not given out yet, with their numbers."""
        data = self.data
        start = max(start, self.done)
        if start >= end:
            return
        self._number += data.count(b"\n", self._counted, start)
        self._counted = start
        while start < end:
            stop = data.find(b"\n", start, end)
            number = self._number
            if stop < 0:
                raw, start = data[start:end], end
            else:
                raw, start = data[start:stop], stop + 1
                self._number += 1
            self._counted = self.done = start
            self.given = number
            yield number, raw

    def keep(self) -> None:
        """Drop all but the last lines."""
        data = self.data
        start = lines_back(data, len(data), EDGE, 0)
        stamp = data.rfind(b"\n[20", 0, start)
        if stamp >= 0 and data.find(b"\n[20", start - 1) < 0:
            stop = data.find(b"\n", stamp + 1)
            line = data[stamp + 1 : len(data) if stop < 0 else stop][:MAX_LINE]
            self.stamped = (self._number_at(stamp + 1), line) if stamp + 1 >= self.done else None
        elif stamp >= 0:
            self.stamped = None
        self._number = self._number_at(start)
        self._counted = 0
        self.first_kept = self._number
        self.done = max(self.done - start, 0)
        self.data = data[start:]

    def _number_at(self, place: int) -> int:
        if place >= self._counted:
            return self._number + self.data.count(b"\n", self._counted, place)
        return self._number - self.data.count(b"\n", place, self._counted)


def sift(chunks: Iterable[bytes], *, literals: Sequence[str], tally: Counter) -> Sifted:
    """Lines that the parser must see; every chunk also goes to ``tally``. Memory: one chunk and :data:`EDGE` lines.

    :param chunks: whole lines, as :func:`ddtree_ops.diagnose.source.read_chunks` gives them.
    :param literals: texts of signatures, each of which makes a line hot.
    """
    return Sifted(chunks, literals, tally)
