"""A selection from a log of any size: whole chunks are searched, and only lines that may matter are read one by one.

A line is skipped where nothing can be lost by it: its wrapping is one of those whose lines stand for themselves
(:meth:`Skim._safe`), and none of the texts that a match, or what a :class:`~ddtree_ops.diagnose.lens.Lens` remembers,
depends on is in it. All others are unwrapped and given to the lens in their order, with the lines that it wants around
them: what is shown, and its numbers, are those of reading every line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, BinaryIO

import re2

from ddtree_ops.diagnose.formats import WHEN, unwrap
from ddtree_ops.diagnose.lens import Lens, Query, Record, Shown, moment_of, records_of_lines
from ddtree_ops.diagnose.lines import OTHERS, Reader, uncoloured
from ddtree_ops.diagnose.regex import compile_bytes
from ddtree_ops.diagnose.sieve import any_text, lines_back
from ddtree_ops.diagnose.source import read_chunks

__all__ = ["Skim", "needed_texts"]

_STATE = ("Traceback (most recent call last)", "ServerArgs(")
"""Texts of lines that say what a line behind them means to a signature."""

_READ = (
    rb"\x1b|\\u001[bB]|Suppressed |it\]\[|/s\]\[|\?\]\[|[\x00-\x08\x0b-\x1f]"
    rb'|"(?:OBJECT_SYSTEMD_)?UNIT"|"_TRANSPORT"\s*:\s*"kernel"|"_LINE_BREAK"|"MESSAGE"\s*:\s*[^\s"]'
)
"""Lines that are more, or other, than their bytes say, and those whose speaker must be looked at."""

_UNUSUAL = rb"|[\x80-\xff]|\\u[0-9a-fA-F]{4}"
"""Letters that fold, or belong to a class, in other ways than ASCII."""
_ESCAPES = rb"|\\u00[2-7][0-9a-fA-F]"
"""Printable ASCII that a writer of JSON need not have escaped."""

_BODY = rb"(?:\[20\d\d-\d\d-\d\d \d\d[^\n]*| [^\n]*|INFO: [^|\t\n]*)?\n"
_STAMPED = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) (?:(?:stdout|stderr) F )?"
_POD = rb"\[pod/[^\s\]/]{1,120}(?:/[^\s\]]{1,120})?\] (?:" + _STAMPED + rb")?"
_DOCKER = rb'\{"log":"(?:[^\n]*[^\n\\])?\\n","stream":"std(?:out|err)"(?:,"attrs":\{[^{}\n]*\})?,"time":"[^"\n]*"\}\n'
_SHORTEST = 3
_OTHER_THAN_RE2 = re.compile(r"\\[AZzGQECpPBhvR0-9]|\[:|\{,|\[\[|&&|--|~~|\|\||\(\?[^:P]|\(\?P[^<]")


def needed_texts(pattern: str) -> tuple[str, ...] | None:
    """Texts of which every match of a regular expression holds at least one; None where that is not plain to see.

    Words and their alternatives, with dots, stars and escapes between them, are seen; groups and classes are not.
    """
    if any(char in pattern for char in "()[]{}"):
        bare = re.sub(r"\\[()\[\]{}]", "", pattern)
        if any(char in bare for char in "()[]{}"):
            return None
    alternatives: list[list[str]] = [[""]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        runs = alternatives[-1]
        text: str | None = char
        if char == "|":
            alternatives.append([""])
            continue
        if char == "\\":
            text = pattern[at : at + 1]
            at += 1
            if not text or text.isalnum() or not text.isascii():
                text = None
        elif char in ".^$+*?":
            text = None
        follows = pattern[at : at + 1]
        if text is None or follows in ("?", "*"):
            runs.append("")
            continue
        runs[-1] += text
        if follows == "+":
            runs.append("")
    best = [max(runs, key=len) for runs in alternatives]
    return tuple(best) if min(map(len, best)) >= _SHORTEST else None


def _writable(texts: Iterable[str]) -> bool:
    return all(text and text.isprintable() and "\ufffd" not in text for text in texts)


class _Wanted:
    """What makes a line worth reading. :ivar plain: it is only known of lines without a wrapping."""

    def __init__(self, query: Query) -> None:
        self.plain = False
        self.pattern: Any = None
        found = None if query.phases or query.ranks else self._of(query)
        if found is not None:
            self.pattern = compile_bytes(b"|".join((found, _READ)))

    def _of(self, query: Query) -> bytes | None:
        if query.library is not None:
            return any_text([*_STATE, *query.library.all_literals()]) + _ESCAPES
        if query.pattern is None:
            return None
        folded = bool(query.pattern.flags & re.IGNORECASE)
        if query.pattern.flags & ~(re.IGNORECASE | re.UNICODE):
            return None
        text = query.pattern.pattern
        texts = needed_texts(text)
        if texts is not None and _writable(texts) and (not folded or text.isascii()):
            found = any_text(texts)
            return b"(?i:" + found + b")" + _UNUSUAL if folded else found + _ESCAPES
        if not text.isascii() or not text.isprintable() or _OTHER_THAN_RE2.search(text):
            return None
        self.plain = True
        found = (rb"(?im:" if folded else rb"(?m:") + text.encode() + b")" + _UNUSUAL
        try:
            compile_bytes(found)
        except re2.error:
            return None
        return found


class Skim:
    """What a lens shows of a log; the lens is told how many lines were searched, and of what time.

    The time is that of the dated lines at the ends of each chunk.

    :param quick: False reads every line, with the same outcome.
    :ivar read: lines read one by one.
    :raises UsageError: it is no log (while it is read).
    """

    def __init__(self, stream: BinaryIO | bytes | Iterable[bytes], lens: Lens, *, quick: bool = True) -> None:
        self.read = 0
        self._chunks = read_chunks(stream)
        self._lens = lens
        self._wanted = _Wanted(lens.query)
        self._quick = quick and self._wanted.pattern is not None
        self._reader: Reader | None = None
        self._number = 1
        self._left = b""
        self._safe_for: object = None
        self._safe_lines: Any = None
        self._pids: frozenset[int | None] = frozenset()
        self._of_pids: Any = None

    def __iter__(self) -> Iterator[list[Shown]]:
        """What is to be shown, record by record (:meth:`Lens.look`)."""
        for raw in self._chunks:
            chunk = uncoloured(raw)
            if self._reader is None:
                self._reader = Reader(chunk)
            lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
            times = [self._dated(chunk, last=last) for last in (False, True)]
            dated = [time for time in times if time is not None]
            self._lens.count(min(dated, default=None), max(dated, default=None), lines)
            if self._quick and self._quickly(self._reader):
                yield from self._skim(self._reader, self._left + chunk, len(self._left))
            else:
                data, self._left = self._left + chunk, b""
                yield from self._lines(self._reader, data, 0, len(data))
        if self._reader is not None:
            yield from self._look(self._reader.close())

    def _quickly(self, reader: Reader) -> bool:
        return reader.bare and (not self._wanted.plain or reader.form.name == "plain")

    def _dated(self, chunk: bytes, *, last: bool) -> datetime | None:
        """Time of the first or the last line of a chunk that has one."""
        form = self._reader.form if self._reader else None
        at, end = 0, len(chunk) - chunk.endswith(b"\n")
        while form is not None and at <= end:
            if last:
                start = chunk.rfind(b"\n", at, end) + 1 or at
                raw, end = chunk[start:end], start - 1
            else:
                stop = chunk.find(b"\n", at, end)
                stop = end if stop < 0 else stop
                raw, at = chunk[at:stop], stop + 1
            text = raw.decode("utf-8", "replace")
            moment = moment_of(text[:40])
            if moment is None and (piece := unwrap(text, form)) is not None:
                moment = moment_of(piece.time) or moment_of(piece.text[:40])
            if moment is not None:
                return moment
        return None

    def _safe(self, reader: Reader) -> Any:
        """A pattern of any number of lines that each say what they say whatever was said before."""
        key = (reader.servers, frozenset(reader.form.names))
        if key != self._safe_for or self._safe_lines is None:
            self._safe_for = key
            kinds = [
                _BODY,
                _STAMPED + _BODY,
                rb"\[20\d\d-\d\d-\d\dT[\d:.]{8,18}Z\] " + _BODY,
                _POD + _BODY,
                _DOCKER,
            ]
            servers = [name for name in sorted(reader.servers) if not OTHERS.fullmatch(name)]
            if servers:
                names = any_text(servers, escaped=False)
                kinds.append(rb'\{[^\n]*"_SYSTEMD_UNIT"\s?:\s?"(?:' + names + rb')"[^\n]*\}\n')
                kinds.append(WHEN.encode() + rb" [^\s\[\]:|]{1,64} (?:" + names + rb")\[\d{1,10}\]: [^\n]*\n")
            if reader.form.names:
                names = any_text(reader.form.names, escaped=False)
                kinds.append(b"(?:" + names + rb") {0,60}\| " + _BODY)
            self._safe_lines = compile_bytes(b"(?:" + b"|".join(kinds) + b")+")
        return self._safe_lines

    def _skim(self, reader: Reader, data: bytes, at: int) -> Iterator[list[Shown]]:
        """Lines of ``data`` that matter; those before ``at`` are of the chunk before, and were not read."""
        lens, wanted, before = self._lens, self._wanted.pattern, self._lens.query.before
        done, size = 0, len(data)
        while at < size:
            if lens.wants_more or reader.waits:
                end = data.find(b"\n", at) + 1 or size
                yield from self._lines(reader, data, at, end)
                done = at = end
                continue
            found = self._safe(reader).match(data, at)
            until = found.end() if found is not None else at
            place = until
            for pattern in (wanted, self._pid_pattern()):
                hit = None if pattern is None or place == at else pattern.search(data, at, place)
                if hit is not None:
                    place = hit.start()
            if place == size:
                break
            start = max(data.rfind(b"\n", 0, place) + 1, at)
            end = data.find(b"\n", place) + 1 or size
            begin = lines_back(data, start, before, done)
            if begin > done:
                self._number += data.count(b"\n", done, begin)
                lens.skip()
            yield from self._lines(reader, data, begin, end)
            done = at = end
        kept = lines_back(data, size, before, done)
        if kept > done:
            self._number += data.count(b"\n", done, kept)
            lens.skip()
        self._left = data[kept:]

    def _pid_pattern(self) -> Any:
        """Finds what a process with a traceback under way may say."""
        pids = self._lens.open_pids
        if pids != self._pids:
            self._pids = pids
            known = sorted(pid for pid in pids if pid is not None)
            self._of_pids = compile_bytes("|".join(map(str, known)).encode()) if known else None
        return self._of_pids

    def _lines(self, reader: Reader, data: bytes, start: int, end: int) -> Iterator[list[Shown]]:
        while start < end:
            stop = data.find(b"\n", start, end)
            stop = end if stop < 0 else stop
            self.read += 1
            yield from self._look(reader.line(data[start:stop], self._number))
            self._number += 1
            start = stop + 1

    def _look(self, lines: Iterable[Any]) -> Iterator[list[Shown]]:
        record: Record
        for record in records_of_lines(lines):
            if found := self._lens.look(record):
                yield found
