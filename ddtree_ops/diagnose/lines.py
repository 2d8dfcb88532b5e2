"""One line of a log, wherever it came from.

Plain server logs are bytes with ANSI colours and carriage-return progress bars; the journal gives entries. Both
become :class:`LogLine`, which is all the rest of this layer knows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

__all__ = ["MAX_LINE", "EntryLike", "LogLine", "Source", "clean", "from_entries", "read_log"]

Source = Literal["process", "systemd", "kernel"]

MAX_LINE = 1 << 18
"""Longest line kept, in bytes and characters; the rest of it is dropped. A ServerArgs dump has 11 kB."""

_SOURCES: dict[str, Source] = {"systemd": "systemd", "kernel": "kernel"}
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_GLUED = re.compile(r"(?<=\])\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\[]{0,40}\] ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of text without its newline.

    :param number: 1-based position in what was read.
    :param time: when it was written, as the source says it; empty if only the text knows.
    :param source: who wrote it: the service's processes, systemd about the unit, or the kernel.
    :param pid: process that wrote it, where known; lines of one PID never interleave with each other.
    """

    text: str
    number: int
    time: str = ""
    source: Source = "process"
    pid: int | None = None


class EntryLike(Protocol):
    """What a journal entry must have; ``source`` other than systemd and kernel counts as process."""

    @property
    def message(self) -> str: ...

    @property
    def time(self) -> object: ...

    @property
    def source(self) -> str: ...

    @property
    def pid(self) -> int | None: ...


def clean(text: str) -> list[str]:
    """A raw line as the lines a person saw: colours gone, a progress bar reduced to its last state.

    More than one line comes back where a log record was printed behind a progress bar without a newline.
    """
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "\r" in text:
        drawn = [part for part in text.split("\r") if part.strip()]
        text = drawn[-1] if drawn else ""
    if "it][" in text or "/s][" in text or "?][" in text:
        parts, last = [], 0
        for match in _GLUED.finditer(text):
            parts.append(text[last : match.start()])
            last = match.start()
        return [*parts, text[last:]] if parts else [text]
    return [text]


def read_log(stream: BinaryIO | bytes) -> Iterator[LogLine]:
    """Lines of a plain server log; bytes that are not UTF-8 become U+FFFD. Memory: one line."""
    source = io.BytesIO(stream) if isinstance(stream, bytes | bytearray) else stream
    number = 0
    while raw := source.readline(MAX_LINE):
        number += 1
        if not raw.endswith(b"\n"):
            while (rest := source.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
        for text in clean(raw.decode("utf-8", "replace").rstrip("\r\n")):
            yield LogLine(text, number)


def from_entries(entries: Iterable[EntryLike]) -> Iterator[LogLine]:
    """Journal entries as lines; an entry with newlines in it is several lines of the same number."""
    for number, entry in enumerate(entries, 1):
        source = _SOURCES.get(entry.source, "process")
        stamp = entry.time
        when = (
            stamp
            if isinstance(stamp, str)
            else (stamp.isoformat() if hasattr(stamp, "isoformat") else str(stamp or ""))
        )
        for raw in entry.message[:MAX_LINE].rstrip("\n").split("\n"):
            for text in clean(raw.rstrip("\r")):
                yield LogLine(text, number, when, source, entry.pid)
