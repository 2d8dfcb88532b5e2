"""What of a log is shown: a selection over the entries of a journal or the lines of a file, one after the other. Pure.

A :class:`Lens` is fed every entry of one source in its order and gives back what is to be shown, with the context
asked for. What phase the server was in and which rank spoke is known from what was said before: eight ranks and a
traceback that has no prefix are told apart by the process in a journal, and by the best guess in a file.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from ddtree_ops.diagnose.events import LOADING, Frame, PhaseKind, parse_phase, parse_prefix, parse_server_args
from ddtree_ops.diagnose.lines import LogLine, Source, clean
from ddtree_ops.errors import UsageError
from ddtree_ops.service.journal import Entry, MessageId

if TYPE_CHECKING:
    from ddtree_ops.diagnose.facts import ServiceFacts
    from ddtree_ops.diagnose.library import Library, Signature

__all__ = [
    "PHASE_WORDS",
    "Lens",
    "Life",
    "Query",
    "Record",
    "Shown",
    "between",
    "moment_of",
    "newest",
    "parse_phases",
    "parse_rank",
    "record_of",
    "records_of_lines",
]

_STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)([.,]\d{1,6})?\d*(Z|[+-]\d\d:?\d\d)?")
_SUPPRESSED = re.compile(r"Suppressed (\d+) messages from ")


@dataclass(frozen=True)
class Record:
    """An entry of a journal, or a line of a file, on its way to be shown.

    :param text: without line end; secrets are masked in entries of a journal, in lines of a file not yet.
    :param time: when it was written, by the clock of its host; None where a file does not say. A time without a zone
        is taken for UTC.
    :param number: 1-based place in what was read.
    :param dated: the time is not in the text itself.
    """

    text: str
    number: int
    time: datetime | None = None
    source: Source = "process"
    pid: int | None = None
    invocation: str = ""
    message_id: str = ""
    dated: bool = True

    @cached_property
    def prefix(self) -> tuple[str, str]:
        """Rank (``DP0 TP3``, or empty) of a line with SGLang's prefix, and the text behind it."""
        found = parse_prefix(self.text) if self.source == "process" else None
        return (found.rank, found.body) if found else ("", self.text)

    @cached_property
    def prefixed(self) -> bool:
        """The line begins with SGLang's time."""
        return self.text.startswith("[") and self.prefix[1] is not self.text


def record_of(entry: Entry, number: int) -> Record:
    """One journal entry."""
    return Record(
        entry.message, number, entry.time, entry.source, entry.pid, entry.invocation, entry.message_id
    )


def records_of_lines(lines: Iterable[LogLine]) -> Iterator[Record]:
    """Lines of a file; the time is what the file says of a line, or else the line itself."""
    for line in lines:
        own = moment_of(line.text[:40])
        moment = moment_of(line.time) if line.time else own
        yield Record(line.text, line.number, moment, line.source, line.pid, dated=own is None)


def between(records: Iterable[Record], since: datetime | None, until: datetime | None) -> Iterator[Record]:
    """Records of that time, both ends included. One without a time was written when the dated one before it was.

    With ``since``, those before the first dated one are left out: nobody knows when they were written.
    """
    latest: datetime | None = None
    for record in records:
        latest = record.time or latest
        if latest is None:
            if since is None:
                yield record
        elif (since is None or latest >= since) and (until is None or latest <= until):
            yield record


def moment_of(text: str) -> datetime | None:
    """The time with which ``text`` begins, in brackets or not; without a zone it is taken for UTC. None: there is none."""
    found = _STAMP.match(text)
    if found is None:
        return None
    day, clock, fraction, zone = found.groups(default="")
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}{fraction.replace(',', '.')}{zone}")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# ------------------------------------------------------------------------------------------------ phases

_KINDS: Mapping[PhaseKind, str] = {
    PhaseKind.ARGUMENTS: "start",
    PhaseKind.DISTRIBUTED: "start",
    **LOADING,
    PhaseKind.READY: "serving",
    PhaseKind.STOPPING: "stopping",
    PhaseKind.FAILED: "failed",
}
PHASE_WORDS: Mapping[str, frozenset[str]] = {
    "start": frozenset({"start"}),
    "weights": frozenset({"weights"}),
    "kv-cache": frozenset({"kv-cache"}),
    "graphs": frozenset({"graphs"}),
    "loading": frozenset({"start", "weights", "kv-cache", "graphs"}),
    "warm-up": frozenset({"warm-up"}),
    "serving": frozenset({"serving"}),
    "ready": frozenset({"serving"}),
    "stopping": frozenset({"stopping"}),
    "failed": frozenset({"failed"}),
}
"""What ``--phase`` takes, and the phases that each stands for."""
_OTHER_WORDS = {
    "warmup": "warm-up",
    "kv": "kv-cache",
    "graph": "graphs",
    "load": "loading",
    "stop": "stopping",
}
_ALIVE = ("Decode batch", "Prefill batch")
_ACCESS = ' HTTP/1.1" '
_STARTS = frozenset((MessageId.STARTING,))
_STOPS = frozenset((MessageId.STOPPING,))
_FAILS = frozenset((MessageId.FAILED, MessageId.EXITED, MessageId.START_FAILED, MessageId.OUT_OF_MEMORY))
_OF_A_STOP = ("SIGQUIT received", "Received sigquit", "Subprocess ")
_RANKS_KEPT = 1024


def parse_phases(words: Iterable[str]) -> frozenset[str]:
    """Phases from the words of ``--phase``, each a word or several with commas. :raises UsageError: an unknown one."""
    found: set[str] = set()
    for word in [part for given in words for part in given.lower().replace(",", " ").split()]:
        known = PHASE_WORDS.get(_OTHER_WORDS.get(word, word))
        if known is None:
            from ddtree_ops.inventory.yaml_source import suggestion

            raise UsageError(
                f"no phase {word!r}{suggestion(word, PHASE_WORDS)}",
                hint=f"write one of {', '.join(PHASE_WORDS)}",
            )
        found |= known
    return frozenset(found)


class Life:
    """What the server was doing as each record was written: fed all records in order, it names the phase.

    The words are those of :data:`PHASE_WORDS` without ``loading`` and ``ready``. Ranks load side by side: a line of a
    rank has the rank's own phase, any other the latest phase of all. A log that begins in the middle is taken for one of
    a start until it shows the server at work.
    """

    def __init__(self) -> None:
        self._now = ""
        self._of: dict[str, str] = {}
        self._invocation = ""

    def feed(self, record: Record) -> str:
        """The phase in which ``record`` was written; a line that begins a phase belongs to it."""
        if record.source == "systemd":
            self._systemd(record)
            return self._now or "start"
        if record.source == "kernel":
            return self._now or "start"
        if record.invocation and record.invocation != self._invocation:
            self._restart(record.invocation)
        rank, body = record.prefix
        known = self._of.get(rank, "") if rank else self._now
        phase = next((found for part in clean(record.text) if (found := parse_phase(part)) is not None), None)
        if phase is None:
            if (self._now in ("", "start") and body.startswith(_ALIVE)) or (
                not self._now and _ACCESS in body
            ):
                self._enter("serving", rank)
            return (rank and self._of.get(rank, "")) or self._now or "start"
        if phase.kind is PhaseKind.ARGUMENTS:
            self._restart(self._invocation)
            return self._now
        word = _KINDS.get(phase.kind, known)
        if word == "failed" and self._now == "stopping" and body.startswith(_OF_A_STOP):
            word = "stopping"
        if word:
            self._enter(word, rank)
        return word or self._now or "start"

    def _enter(self, word: str, rank: str) -> None:
        self._now = word
        if word in ("serving", "stopping", "failed", "warm-up"):
            self._of.clear()
        if rank and len(self._of) < _RANKS_KEPT:
            self._of[rank] = word

    def _restart(self, invocation: str) -> None:
        self._now, self._invocation = "start", invocation
        self._of.clear()

    def _systemd(self, record: Record) -> None:
        if record.message_id in _STARTS:
            self._restart(record.invocation)
        elif record.message_id in _STOPS:
            self._enter("stopping", "")
        elif record.message_id in _FAILS and self._now != "stopping":
            self._enter("failed", "")


# ------------------------------------------------------------------------------------------------- ranks

_RANK = re.compile(r"[A-Z][A-Z_]{0,15}\d{1,5}")
_TRACEBACK = "Traceback (most recent call last)"
_BLOCK_END = re.compile(r"[A-Za-z_][\w.]*(?:: .*|:)?$")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*(?:: .*|:)?$", re.DOTALL)


def parse_rank(text: str) -> frozenset[str]:
    """A rank as SGLang prints it: ``TP3``, ``DP0``, or both, which then both must be. :raises UsageError: another."""
    words = text.upper().replace(",", " ").split()
    if not words or not all(_RANK.fullmatch(word) for word in words):
        hint = f"write TP{text}" if text.isdigit() else "write TP3, DP0, or 'DP0 TP3'"
        raise UsageError(f"{text!r} is no rank", hint=hint)
    return frozenset(words)


_FRAME = re.compile(r' +File "([^"]{1,400})", line (\d{1,9}), in (.{1,200})')
_FRAMES_KEPT, _CODE_KEPT = 100, 400


class _Speakers:
    """Which rank wrote a record."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._of_pid: dict[int, str] = {}
        self._in_block = ""

    def feed(self, record: Record) -> str:
        """Rank as printed, or that of the process, or of the traceback that goes on; empty: none."""
        rank, body = record.prefix
        if record.prefixed:
            self._in_block = rank if _TRACEBACK in body else ""
            if rank and len(self.seen) < _RANKS_KEPT:
                self.seen.update(rank.split())
            if rank and record.pid is not None and len(self._of_pid) < _RANKS_KEPT:
                self._of_pid[record.pid] = rank
            return rank
        if record.source != "process":
            return ""
        if record.pid is not None:
            return self._of_pid.get(record.pid, "")
        rank = self._in_block
        if (
            rank
            and record.text[:1].strip()
            and not record.text.startswith((_TRACEBACK, "During ", "The above"))
        ):
            if _BLOCK_END.match(record.text):
                self._in_block = ""
            else:
                rank = self._in_block = ""
        return rank


class _Frames:
    """Frames of the tracebacks under way, by process; in a file, where ranks print at the same time, the best guess."""

    def __init__(self) -> None:
        self._of: dict[int | None, deque[Frame]] = {}
        self.open: frozenset[int | None] = frozenset()

    def feed(self, record: Record) -> tuple[Frame, ...]:
        """The frames printed so far of the traceback that ``record`` goes on with or ends."""
        found = self._feed(record)
        if len(self.open) != len(self._of):
            self.open = frozenset(self._of)
        return found

    def _feed(self, record: Record) -> tuple[Frame, ...]:
        frames = self._of.get(record.pid)
        if _TRACEBACK in record.text:
            if len(self._of) < _RANKS_KEPT or record.pid in self._of:
                self._of[record.pid] = deque(maxlen=_FRAMES_KEPT)
            return ()
        if frames is None:
            return ()
        if record.prefixed:
            del self._of[record.pid]
            return ()
        if (found := _FRAME.match(record.text)) is not None:
            frames.append(Frame(found[1], int(found[2]), found[3]))
        elif frames and not frames[-1].code and record.text.startswith("    "):
            frames[-1] = replace(frames[-1], code=record.text.strip()[:_CODE_KEPT])
        return tuple(frames)


# ------------------------------------------------------------------------------------------------- lens


@dataclass(frozen=True)
class Query:
    """What is asked for; all that is given must hold.

    :param pattern: searched anywhere in the text.
    :param library: only lines that one of its signatures knows, benign ones too.
    :param phases: as :func:`parse_phases` gives them; empty: all.
    :param ranks: each as :func:`parse_rank` gives it, of which one must hold; empty: all.
    :param before: records of context before a match of ``pattern`` and ``library``; ``after`` behind it.
    """

    pattern: re.Pattern[str] | None = None
    library: Library | None = None
    phases: frozenset[str] = frozenset()
    ranks: tuple[frozenset[str], ...] = ()
    before: int = 0
    after: int = 0

    @property
    def selects(self) -> bool:
        """Something is asked for: it may be that nothing matches."""
        return bool(self.pattern is not None or self.library is not None or self.phases or self.ranks)


@dataclass(frozen=True)
class Shown:
    """A record to be shown.

    :param match: it is what was asked for; False: its context.
    :param gap: with context: records are left out between this one and the one shown before it.
    :param phase: where phases were asked for, ``rank`` where ranks were.
    :param signature: that knows it.
    """

    record: Record
    match: bool = True
    gap: bool = False
    phase: str = ""
    rank: str = ""
    signature: Signature | None = None


class Lens:
    """Selects from the records of one source, in one pass; memory: the context.

    :param facts: of the service, for signatures that calculate; filled up from the log itself.
    :ivar searched: records looked at; ``matched`` of them were asked for, ``suppressed`` were dropped by journald.
    :ivar first: earliest time seen, ``last`` the latest; None where no record had one.
    """

    def __init__(self, query: Query, facts: ServiceFacts | None = None) -> None:
        self.query = query
        self.searched = self.matched = self.suppressed = 0
        self.first: datetime | None = None
        self.last: datetime | None = None
        self._facts = facts
        self._life = Life() if query.phases else None
        self._speakers = _Speakers() if query.ranks else None
        self._frames = _Frames()
        self._waiting: deque[Shown] = deque(maxlen=query.before)
        self._after = 0
        self._left_out = False

    @property
    def ranks(self) -> tuple[str, ...]:
        """Ranks that spoke, sorted; empty where no rank was asked for."""
        return tuple(sorted(self._speakers.seen)) if self._speakers else ()

    def count(self, first: datetime | None, last: datetime | None, records: int = 0) -> None:
        """Take note of records that were looked at elsewhere."""
        self.searched += records
        if first is not None and (self.first is None or first < self.first):
            self.first = first
        if last is not None and (self.last is None or last > self.last):
            self.last = last

    @property
    def wants_more(self) -> bool:
        """The next record must be given: it is context, or may go on with a traceback whose process is not known."""
        return self._after > 0 or None in self.open_pids

    @property
    def open_pids(self) -> frozenset[int | None]:
        """Processes whose traceback may go on; None: that of a file which does not name them."""
        return self._frames.open

    def skip(self) -> None:
        """Records were left out that neither match nor are wanted."""
        self._waiting.clear()
        self._left_out = True

    def feed(self, record: Record) -> list[Shown]:
        """What is to be shown now: nothing, the record, or the record with what was before it."""
        self.count(record.time, record.time, 1)
        return self.look(record)

    def look(self, record: Record) -> list[Shown]:
        """As :meth:`feed`, of a record that was, or will be, counted elsewhere."""
        if record.source != "process" and (dropped := _SUPPRESSED.match(record.text)):
            self.suppressed += int(dropped[1])
        query = self.query
        phase = self._life.feed(record) if self._life else ""
        rank = self._speakers.feed(record) if self._speakers else ""
        signature = self._known(record) if query.library is not None else None
        if (query.phases and phase not in query.phases) or (
            query.ranks and not any(wanted <= {*rank.split()} for wanted in query.ranks)
        ):
            return []
        match = (query.library is None or signature is not None) and (
            query.pattern is None or query.pattern.search(record.text) is not None
        )
        shown = Shown(record, match, False, phase, rank, signature)
        if match:
            self.matched += 1
        return self._with_context(shown)

    def _with_context(self, shown: Shown) -> list[Shown]:
        query = self.query
        if not query.before and not query.after:
            return [shown] if shown.match else []
        if not shown.match:
            if self._after:
                self._after -= 1
                return [shown]
            if len(self._waiting) == query.before:
                self._left_out = True
            self._waiting.append(shown)
            return []
        found = [*self._waiting, shown]
        if self._left_out:
            found[0] = replace(found[0], gap=True)
        self._waiting.clear()
        self._left_out = False
        self._after = query.after
        return found

    def _known(self, record: Record) -> Signature | None:
        library, text = self.query.library, record.text
        if library is None:
            return None
        if record.source != "process":
            found = library.match(text, record.source, self._facts)
            return found.signature if found else None
        frames = self._frames.feed(record)
        if "ServerArgs(" in text:
            values = parse_server_args(text)
            if values is not None:
                from ddtree_ops.diagnose.facts import ServiceFacts

                self._facts = (self._facts or ServiceFacts()).learn_arguments(values)
                return None
        body = record.prefix[1]
        for part in clean(body):
            raised = _EXCEPTION.match(part)
            found = library.match(part, "traceback", self._facts, frames) if raised and frames else None
            found = found or library.match(part, "log", self._facts)
            if found is None and raised and not frames:
                found = library.match(part, "traceback", self._facts)
            if found is not None:
                return found.signature
        return None


def newest(found: Iterable[list[Shown]], matches: int, before: int) -> list[Shown]:
    """Of what a lens gave, the last so many matches with their context, as if the log began there.

    :param found: what :meth:`Lens.feed` gave, call by call.
    :param before: as the query has it. Memory: what is given back.
    """
    kept: deque[list[Shown]] = deque()
    for batch in found:
        if not batch:
            continue
        if not batch[-1].match:
            if kept:
                kept[-1] += batch
            continue
        kept.append(batch)
        if len(kept) > matches:
            gone, first = kept.popleft(), kept[0]
            missing = before - sum(1 for _ in takewhile(lambda item: not item.match, first))
            if not first[0].gap and missing > 0:
                first[:0] = [replace(item, match=False) for item in gone[-missing:]]
    return [item for batch in kept for item in batch]
