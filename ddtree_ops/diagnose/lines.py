"""One line of a log, wherever it came from.

Logs are bytes with ANSI colours and carriage-return progress bars, wrapped by a journal, a container runtime or a
person who pasted them; the journal gives entries. All become :class:`LogLine`, which is all the rest of this layer
knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import BinaryIO, Literal, Protocol

from ddtree_ops.diagnose.formats import Form, Piece, detect, unwrap
from ddtree_ops.diagnose.source import MAX_LINE, read_chunks

__all__ = [
    "MAX_LINE",
    "OTHERS",
    "EntryLike",
    "LogLine",
    "Reader",
    "Source",
    "clean",
    "from_entries",
    "read_log",
    "seconds_of",
    "uncoloured",
]

Source = Literal["process", "systemd", "kernel"]

_SOURCES: dict[str, Source] = {"systemd": "systemd", "kernel": "kernel"}
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_ANSI_RAW = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_ANSI_JSON = re.compile(rb"(?<!\\)\\u001[bB]\[[0-?]*[ -/]*[@-~]")
_EPOCH = datetime(1970, 1, 1)
_GLUED = re.compile(r"(?<=\])\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\[]{0,40}\] ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of text without its newline.

    :param number: 1-based position in what was read.
    :param time: when it was written, as the source says it; empty if only the text knows.
    :param source: who wrote it: the service's processes, systemd about the unit, or the kernel.
    :param pid: process that wrote it, where known; lines of one PID never interleave with each other.
    :param host: machine, pod or container that it came from, where the wrapping tells.
    """

    text: str
    number: int
    time: str = ""
    source: Source = "process"
    pid: int | None = None
    host: str = ""


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


def seconds_of(text: str) -> float | None:
    """The time with which ``text`` begins as seconds, to be compared with others of the same log; a zone does not count.

    None where it begins with no ``2026-01-29 00:24:41`` or ``2026-01-29T00:24:41``.
    """
    if len(text) < 19:
        return None
    try:
        return (datetime.fromisoformat(text[:19].replace("T", " ")) - _EPOCH).total_seconds()
    except ValueError:
        return None


def uncoloured(chunk: bytes) -> bytes:
    """Whole lines without the control sequences of terminals, also where JSON wrote them as ``\\u001b[``."""
    if b"\x1b" in chunk:
        chunk = _ANSI_RAW.sub(b"", chunk)
    if b"\\" in chunk and (b"\\u001b[" in chunk or b"\\u001B[" in chunk):
        chunk = _ANSI_JSON.sub(b"", chunk)
    return chunk


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


OTHERS = re.compile(
    r"(?:s?cron|crond|anacron|sshd(?:-session|-auth)?|sudo|su|login|agetty|systemd-[\w@.-]+|\(?sd-[\w-]+\)?|dbus[\w-]*|polkit\w*"
    r"|rsyslogd?|syslog-ng|NetworkManager|wpa_supplicant|dhclient|dhcpcd|chronyd|ntpd|snapd|packagekitd?|fwupd|udisksd"
    r"|multipathd|smartd|irqbalance|auditd|audit|postfix[\w/-]*|dockerd|containerd|kubelet|crio|accounts-daemon|gdm[\w-]*"
    r"|ModemManager|avahi-daemon|cloud-init|unattended-upgr\w*|apt[\w.-]*|dpkg|logrotate|fail2ban[\w.-]*|mdadm|lvm|thermald"
    r"|nvidia-persistenced|nv-fabricmanager|nv-hostengine|dcgm[\w-]*|node_exporter|prometheus|tailscaled|ansible[\w-]*)",
    re.IGNORECASE,
)
"""Programs of a machine whose lines are never a server's; names of systemd units without ``.service`` as well."""

_UNIT = re.compile(r"([\w@.:\\-]{1,200})\.(?:service|timer|socket|scope|mount|slice|target|path)\b")
_ENGINE = re.compile(r"sglang|ddtree", re.IGNORECASE)
_SPOKEN = re.compile(
    r"\[20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] |Traceback .*sglang|server_args=ServerArgs\(|.{0,300}sglang"
)
_OPEN_STREAMS = 64
_JOINED = 4 * MAX_LINE


class Reader:
    """Raw lines to :class:`LogLine`, unwrapped, joined where a wrapping had split them, of the server alone.

    Of a whole machine's journal only what the kernel says and what concerns the server is given out: where programs
    that are no server occur, a unit (or an identifier, where no unit is known) counts once it spoke as SGLang does.

    :param sample: the beginning of the log, which tells its form.
    :param unread: gets text and time of every line that cannot be searched as it stands in the file.
    :ivar form: see :func:`ddtree_ops.diagnose.formats.detect`.
    :ivar others: lines left out because another program wrote them.
    :ivar damaged: entries whose text is not there: withheld by journalctl, or JSON that was cut off.
    """

    def __init__(self, sample: bytes = b"", unread: Callable[[str, str], None] | None = None) -> None:
        head = [raw.decode("utf-8", "replace").rstrip("\r") for raw in sample[: 8 * MAX_LINE].split(b"\n")]
        self.form: Form = detect(head)
        self._bare = not (self.form.quoted or self.form.indent or self.form.fenced)
        self.others = 0
        self.damaged = 0
        self._unread = unread
        self._mixed = False
        self._servers: set[str] = set()
        self._open: dict[str, tuple[Piece, int, list[str]]] = {}
        if self.form.name != "plain":
            for text in head[:2000]:
                piece = unwrap(text, self.form)
                if piece is not None and piece.name:
                    self._ours(piece)

    @property
    def bare(self) -> bool:
        """Lines are not quoted, indented or fenced as a whole."""
        return self._bare

    @property
    def waits(self) -> bool:
        """The end of a line that came in pieces is not there yet."""
        return bool(self._open)

    @property
    def servers(self) -> frozenset[str]:
        """Units (or identifiers) of which a line was unmistakably the server's."""
        return frozenset(self._servers)

    def line(self, raw: bytes, number: int) -> list[LogLine]:
        """What one line of the log (without its newline) gives: nothing, or one line or more."""
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        if self._bare and (text[:1] == " " or (text[:3] == "[20" and text[11:12] != "T")):
            return [LogLine(part, number) for part in clean(text)]
        piece = unwrap(text, self.form)
        if piece is None:
            return []
        if piece.name and not self._ours(piece):
            self.others += 1
            return []
        self.damaged += piece.damaged
        if piece.stream:
            joined = self._join(piece, number)
            if joined is None:
                return []
            piece, number = joined
        if piece.raw and self._unread is not None:
            self._unread(piece.text, piece.time)
        return _lines(piece, number)

    def close(self) -> list[LogLine]:
        """Beginnings of lines whose end never came."""
        left = [line for piece, number, parts in self._open.values() for line in _whole(piece, number, parts)]
        self._open.clear()
        return left

    def _join(self, piece: Piece, number: int) -> tuple[Piece, int] | None:
        begun = self._open.pop(piece.stream, None)
        if begun is None and not piece.more:
            return piece, number
        first, number, parts = begun or (piece, number, [])
        if sum(map(len, parts)) < _JOINED:
            parts.append(piece.text)
        if piece.more and len(self._open) < _OPEN_STREAMS:
            self._open[piece.stream] = (first, number, parts)
            return None
        return replace(first, text="".join(parts)), number

    def _ours(self, piece: Piece) -> bool:
        if piece.source == "kernel" or piece.kind not in ("journal-json", "journal-short"):
            return True
        if piece.source == "systemd":
            return self._concerns(piece)
        key = piece.unit or piece.name
        if OTHERS.fullmatch(piece.name):
            self._mixed = True
            return False
        if key in self._servers:
            return True
        if _ENGINE.search(f"{piece.unit} {piece.name} {piece.command}") or _SPOKEN.match(piece.text):
            if len(self._servers) < 1024:
                self._servers.add(key)
            return True
        return not self._mixed or not self._servers

    def _concerns(self, piece: Piece) -> bool:
        unit = piece.unit if piece.unit != "init.scope" else ""
        if not unit:
            named = _UNIT.search(piece.text[:300])
            unit = named[0] if named else ""
        if not unit:
            return True
        if unit in self._servers:
            return True
        if OTHERS.fullmatch(unit.rpartition(".")[0]) or unit.startswith(
            ("user@", "session-", "apt-", "man-db", "getty@")
        ):
            self._mixed = True
            return False
        units = any(name.endswith(".service") for name in self._servers)
        return not (self._mixed and units)


def _whole(piece: Piece, number: int, parts: list[str]) -> list[LogLine]:
    return _lines(replace(piece, text="".join(parts)), number)


def _lines(piece: Piece, number: int) -> list[LogLine]:
    text = piece.text
    if "\n" not in text:
        return [
            LogLine(part, number, piece.time, piece.source, piece.pid, piece.host) for part in clean(text)
        ]
    return [
        LogLine(part, number, piece.time, piece.source, piece.pid, piece.host)
        for raw in text[:_JOINED].split("\n")
        for part in clean(raw.rstrip("\r"))
    ]


def read_log(stream: BinaryIO | bytes | Iterable[bytes]) -> Iterator[LogLine]:
    """Lines of a log in any wrapping, compression and encoding that is known; what is none of them is plain text.

    Bytes that are not UTF-8 become U+FFFD. Memory: one chunk (:mod:`ddtree_ops.diagnose.source`).

    :raises UsageError: it is no log but an archive or a journal's own file.
    """
    reader: Reader | None = None
    number = 0
    for raw in read_chunks(stream):
        chunk = uncoloured(raw)
        reader = reader or Reader(chunk)
        start = 0
        while start < len(chunk):
            end = chunk.find(b"\n", start)
            end = len(chunk) if end < 0 else end
            number += 1
            yield from reader.line(chunk[start:end], number)
            start = end + 1
    if reader is not None:
        yield from reader.close()


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
