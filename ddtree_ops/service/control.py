"""A unit on a host: install, start, stop, look, read. All through one :class:`~ddtree_ops.remote.session.Session`."""

from __future__ import annotations

import ipaddress
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from ddtree_ops.errors import DeadlineError, Inconclusive, NotDeployed, RemoteError, UsageError
from ddtree_ops.remote.session import Completed, Reply, Request, Session, Stream
from ddtree_ops.secret import redact
from ddtree_ops.service.ending import Drain, Ending, EndingKind
from ddtree_ops.service.journal import (
    Entries,
    Entry,
    EntryParser,
    MessageId,
    SearchResult,
    journal_argv,
    parse_entries,
    search,
)
from ddtree_ops.service.state import PROPERTIES, UnitState, parse_show, parse_span

__all__ = ["JournalFollower", "PortOwner", "StartReport", "StopReport", "UnitControl"]

_UTC = {"TZ": "UTC"}
_STOP_MARGIN = 60.0
_STOP_LOOK = 0.1
_START_DEADLINE = 180.0
_LONGEST_STOP = 24 * 3600.0
_PRIVATE = "/run/ddtree-ops"

_LISTENERS = rb"""
import os, re, sys
def answer(port, start):
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            rows = open("/proc/net/" + name).read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            address, _, number = words[1].rpartition(":")
            if words[3] == "0A" and int(number, 16) == port:
                raw = bytes.fromhex(address)
                if sys.byteorder == "little":
                    raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found[words[9]] = {"raw": raw.hex(), "uid": int(words[7]), "pids": []}
    for pid in filter(str.isdigit, os.listdir("/proc")) if found else ():
        try:
            for name in os.listdir("/proc/%s/fd" % pid):
                match = re.match(r"socket:\[(\d+)\]", os.readlink("/proc/%s/fd/%s" % (pid, name)))
                if match and match.group(1) in found:
                    comm = open("/proc/%s/comm" % pid, errors="replace").read().strip()
                    group = open("/proc/%s/cgroup" % pid, errors="replace").read()
                    found[match.group(1)]["pids"].append([int(pid), comm, group])
                    break
        except OSError:
            continue
    return list(found.values())
"""


@dataclass(frozen=True)
class PortOwner:
    """A process that listens on a port. ``unit`` is the systemd unit it runs in, or empty; ``pid`` 0: not visible."""

    pid: int
    command: str
    unit: str
    address: str
    uid: int

    def describe(self) -> str:
        """One line for people."""
        where = f"unit {self.unit}" if self.unit else "no unit"
        return f"{self.command or 'a process'} (PID {self.pid or 'unknown'}, {where}) on {self.address}"


@dataclass(frozen=True)
class StopReport:
    """What stopping did.

    :param changed: False where nothing was running.
    :param seconds: how long ``systemctl stop`` took, by our clock.
    :param ending: how the run ended: drained, cut off, or timed out in a drain that never ended.
    :param looping: no process was left to stop, systemd was waiting to restart a crashed one; ``ending`` is that crash.
    :param killed_after: seconds after which we ended the drain by SIGKILL, or None.
    :param without_head: the run (InvocationID) of a further node that ended by itself as its head was stopped before it.
    """

    changed: bool
    seconds: float
    state: UnitState
    ending: Ending
    entries: tuple[Entry, ...] = ()
    looping: bool = False
    killed_after: float | None = None
    without_head: str = ""

    @property
    def planned_end(self) -> str:
        """The run that ended because somebody asked for it; empty: none did."""
        planned = self.changed and self.ending.planned
        return self.without_head or (self.state.invocation_id if planned else "")

    def describe(self) -> str:
        """One line for people."""
        if self.without_head:
            return "stopped after the head, without which this node ends by itself: planned"
        if not self.changed:
            return f"nothing to stop: {self.state.describe()}"
        if self.looping:
            return f"ended a restart loop: {self.ending.describe()}"
        forced = (
            ""
            if self.killed_after is None
            else " by SIGKILL at once, as asked for"
            if not self.killed_after
            else f" by SIGKILL after {self.killed_after:g} s, as asked for"
        )
        return f"stopped in {self.seconds:.1f} s{forced}: {self.ending.describe()}"


@dataclass(frozen=True)
class StartReport:
    """What starting did.

    :param changed: False where it was running already.
    :param reset: the old failure that had to be cleared first (``start-limit-hit``, ``signal`` ...), or empty.
    :param cursor: end of the journal just before the start; None where the journal was empty.
    :param stop: the stop before it, for a restart.
    """

    changed: bool
    reset: str
    seconds: float
    state: UnitState
    cursor: str | None = None
    stop: StopReport | None = None

    def describe(self) -> str:
        """One line for people."""
        if not self.changed:
            return f"nothing to start: {self.state.describe()}"
        note = f" (cleared the earlier result {self.reset} first)" if self.reset else ""
        return f"started{note}: {self.state.describe()}"


class JournalFollower:
    """New journal entries as they are written. A context manager; ``close()`` ends journalctl on the host.

    :param known: as of :class:`~ddtree_ops.service.journal.EntryParser`.
    """

    def __init__(
        self, stream: Stream, host: str, *, after_cursor: str | None = None, known: Iterable[str] = ()
    ) -> None:
        self._stream = stream
        self._host = host
        self._parser = EntryParser(after_cursor=after_cursor, known=known)
        self._errors: list[bytes] = []
        self._over = False

    @property
    def damaged(self) -> int:
        """Lines so far that could not be read."""
        return self._parser.damaged

    @property
    def place(self) -> tuple[str | None, frozenset[str]]:
        """Where a later follower goes on without losing or repeating an entry: its ``after_cursor`` and ``known``."""
        return self._parser.resume, frozenset(self._parser.ahead)

    @property
    def ended(self) -> bool:
        """journalctl has ended, no entry will come any more."""
        return self._over

    def get(self, timeout: float) -> list[Entry]:
        """Entries that came; empty after ``timeout`` seconds without one (see :attr:`ended`).

        :raises RemoteError: journalctl failed.
        """
        event = self._stream.get(timeout)
        if event is None:
            if self._stream.ended and not self._over:
                self._over = True
                return self._parser.close()
            return []
        values, data = event
        match values.get("event"):
            case "stdout":
                return self._parser.feed(data)
            case "stderr":
                self._errors.append(data)
            case "exit":
                self._over = True
                _check_journal_exit(int(values.get("rc", 0)), b"".join(self._errors), self._host)
                return self._parser.close()
        return []

    def __iter__(self) -> Iterator[Entry]:
        while not self._over:
            yield from self.get(1.0)

    def close(self) -> None:
        """End it, here and on the host."""
        self._over = True
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _lines(*outputs: bytes) -> tuple[str, ...]:
    text = "\n".join(redact(output.decode("utf-8", "replace")).strip() for output in outputs)
    return tuple(line for line in text.splitlines() if line.strip())


def _check_journal_exit(rc: int, stderr: bytes, host: str) -> None:
    if rc != 0:
        raise RemoteError(
            f"journalctl ended with exit status {rc}",
            host=host,
            phase="journal",
            hint="is systemd-journald running, and may we read the system journal?",
            details=_lines(stderr),
        )


def _run(*argv: str) -> Request:
    return Request("run", {"argv": list(argv), "env": _UTC})


def _show(unit: str, *more: str) -> Request:
    return _run("systemctl", "show", "--no-pager", f"--property={','.join((*PROPERTIES, *more))}", "--", unit)


_SYNC = _run("journalctl", "--sync")
_LAST_ENTRY = _run(
    "journalctl", "--output=json", "--quiet", "--no-pager", "--lines=1", "--output-fields=MESSAGE_ID"
)


class UnitControl:
    """One unit on one host. Stateless: every method asks the host.

    :param unit: full unit name (``sglang-k26-ddtree.service``).
    :param writer: the command that writes this unit, for hints; left out: ``ddtree-ops deploy`` of the host.
    """

    def __init__(self, session: Session, unit: str, *, writer: str = "") -> None:
        self.session = session
        self.unit = unit
        self.writer = writer or f"ddtree-ops deploy {session.host}"

    def _completed(self, request: Request, reply: Reply) -> Completed:
        size = int(reply.values["stdout"])
        return Completed(
            tuple(request.args["argv"]),
            int(reply.values["rc"]),
            reply.data[:size],
            reply.data[size:],
            bool(reply.values["truncated"]),
        )

    def _commands(self, *requests: Request, deadline: float = 60.0) -> list[Completed]:
        replies = self.session.ask(requests, deadline=deadline)
        return [self._completed(request, reply) for request, reply in zip(requests, replies, strict=True)]

    def _state(self, shown: Completed) -> UnitState:
        try:
            if shown.rc != 0:
                raise ValueError(f"exit status {shown.rc}")
            return UnitState.parse(parse_show(shown.text))
        except ValueError as error:
            raise RemoteError(
                f"systemctl show {self.unit}: {error}",
                host=self.session.host,
                phase="unit state",
                hint="is systemd running on this host?",
                details=_lines(shown.stderr),
            ) from None

    def state(self) -> UnitState:
        """The unit as it is now; a missing unit is a state too (``exists`` is False). One round trip."""
        return self._state(self._commands(_show(self.unit))[0])

    def verify(self, text: str) -> tuple[str, ...]:
        """What ``systemd-analyze verify`` on the host has to say about a unit text; empty: nothing. One round trip.

        It is judged by its output: it prints problems and still exits 0. Nothing is installed.
        """
        folder = f"{_PRIVATE}/verify-{secrets.token_hex(8)}"
        command = Request(
            "run",
            {
                "argv": ["systemd-analyze", "verify", "--recursive-errors=no", f"{folder}/{self.unit}"],
                "env": _UTC,
            },
        )
        requests = [
            Request("write_file", {"path": f"{folder}/{self.unit}", "mode": 0o644}, text.encode()),
            command,
            Request("remove_tree", {"path": folder, "below": _PRIVATE}),
        ]
        done = self._completed(command, self.session.ask(requests)[1])
        if done.rc == 127:
            raise RemoteError(
                "systemd-analyze is missing",
                host=self.session.host,
                phase="verify unit",
                details=_lines(done.stderr),
            )
        problems = _lines(done.stdout, done.stderr)
        return tuple(line.replace(f"{folder}/", "") for line in problems)

    def install(self, path: str, text: str, *, mode: int = 0o644) -> bool:
        """Write the unit file where it differs, and reload systemd where it needs that. True when it was written.

        One round trip without a change, two with one.

        :raises RemoteError: systemd cannot load the unit, or takes it from another file.
        """
        written, shown = self.session.ask(
            [Request("write_file", {"path": path, "mode": mode}, text.encode()), _show(self.unit)]
        )
        changed = bool(written.values["changed"])
        state = self._state(self._completed(_show(self.unit), shown))
        if changed or state.need_daemon_reload:
            reloaded, shown_again = self._commands(
                _run("systemctl", "daemon-reload"), _show(self.unit), deadline=120.0
            )
            if reloaded.rc != 0:
                raise RemoteError(
                    "systemctl daemon-reload failed",
                    host=self.session.host,
                    phase="install unit",
                    state=f"{path} is written, systemd still uses what it had read before",
                    details=_lines(reloaded.stderr),
                )
            state = self._state(shown_again)
        if not state.loaded:
            raise RemoteError(
                state.describe(),
                host=self.session.host,
                phase="install unit",
                state=f"{path} is written; a process that was running still runs",
                hint=f"systemctl unmask {self.unit}"
                if state.load_state == "masked"
                else f"systemd-analyze verify {path}",
                details=self.verify(text),
            )
        if state.fragment_path != path:
            raise RemoteError(
                f"systemd reads {self.unit} from {state.fragment_path or 'nowhere'}, not from {path}",
                host=self.session.host,
                phase="install unit",
                hint=f"remove or rename {state.fragment_path}"
                if state.fragment_path
                else "systemctl daemon-reload",
            )
        return changed

    def enable(self) -> bool:
        """Have the unit started at boot. True when that is new. One round trip.

        :raises RemoteError: systemd refuses.
        """
        before, done, after = self._commands(
            _show(self.unit),
            _run("systemctl", "enable", "--quiet", "--", self.unit),
            _show(self.unit),
            deadline=120.0,
        )
        if done.rc != 0:
            raise RemoteError(
                f"systemctl enable {self.unit} failed",
                host=self.session.host,
                phase="enable",
                hint=f"systemctl status {self.unit}",
                details=_lines(done.stderr),
            )
        return self._state(before).unit_file_state != self._state(after).unit_file_state

    def start(self) -> StartReport:
        """Start it, clearing an earlier failure first (a start limit once hit refuses even a repaired unit).

        Returns once the process was executed (``Type=exec``): that is far from ready. Two round trips.

        :raises RemoteError: no such unit, or the process could not be executed.
        """
        shown, last = self._commands(_show(self.unit), _LAST_ENTRY)
        before = self._state(shown)
        cursor = self._cursor(last)
        self._need_loaded(before, "start")
        if before.running:
            return StartReport(False, "", 0.0, before, cursor)
        reset = before.result if before.failed or before.result not in {"", "success"} else ""
        commands = [_run("systemctl", "reset-failed", "--", self.unit)] if reset else []
        begin = time.monotonic()
        try:
            *cleared, started, shown = self._commands(
                *commands,
                _run("systemctl", "start", "--", self.unit),
                _show(self.unit),
                deadline=_START_DEADLINE,
            )
        except DeadlineError as error:
            error.at(
                host=self.session.host,
                phase="start",
                hint=f"systemctl list-jobs; systemctl status {self.unit}",
            )
            raise
        seconds = time.monotonic() - begin
        after = self._state(shown)
        if started.rc != 0:
            self._commands(_SYNC)
            said = [entry.message for entry in self.entries(after_cursor=cursor, lines=20)]
            raise RemoteError(
                f"systemctl start {self.unit} failed",
                host=self.session.host,
                phase="start",
                state=after.describe(),
                hint="see the cause above; systemd may be retrying: systemctl stop ends that",
                details=tuple(_lines(*(done.stderr for done in (*cleared, started)))) + tuple(said),
            )
        return StartReport(True, reset, seconds, after, cursor)

    def stop(
        self, *, patience: float | None = None, drain: Callable[[Drain], object] | None = None
    ) -> StopReport:
        """Stop it and say how that went. A few round trips, however long it takes.

        The deadline is the unit's own ``TimeoutStopSec`` plus a minute. What tells a drain from a cut is the journal
        of the stop, not the unit's state: sglang 0.5.11 ends by SIGKILL either way. A client that goes away meanwhile
        changes nothing: systemd goes on stopping it.

        :param patience: seconds after which a process that still runs is ended by SIGKILL; 0: at once. Left out, the
            unit's ``TimeoutStopSec`` does that.
        :param drain: called each time the server said how many requests remain.
        :raises RemoteError: no such unit, or it still runs afterwards.
        """
        shown, last = self._commands(_show(self.unit, "TimeoutStopUSec"), _LAST_ENTRY)
        before = self._state(shown)
        self._need_loaded(before, "stop")
        if before.active_state in {"inactive", "failed"} and before.job is None:
            return StopReport(False, 0.0, before, Ending.of((), result=before.result))
        try:
            limit = parse_span(before.properties.get("TimeoutStopUSec", ""))
        except ValueError:
            limit = math.inf
        cursor = self._cursor(last)
        begin = time.monotonic()
        killed = self._end(before, cursor, min(limit, _LONGEST_STOP) + _STOP_MARGIN, patience, drain)
        read = _run(*journal_argv(self.unit, after_cursor=cursor, invocation=before.invocation_id or None))
        _, shown, journal = self._commands(_SYNC, _show(self.unit), read)
        seconds = time.monotonic() - begin
        after = self._state(shown)
        if after.active_state not in {"inactive", "failed"}:
            raise RemoteError(
                f"systemctl stop {self.unit} did not stop it",
                host=self.session.host,
                phase="stop",
                state=after.describe(),
                hint=f"systemctl list-jobs; systemctl status {self.unit}",
            )
        _check_journal_exit(journal.rc, journal.stderr, self.session.host)
        entries = tuple(parse_entries([journal.stdout], after_cursor=cursor))
        after_s = patience if killed else None
        if before.auto_restarting:
            ending = Ending(EndingKind.CRASHED, result=before.result, exit=before.main_exit)
            return StopReport(True, seconds, after, ending, entries, looping=True)
        stopping = before.active_state == "deactivating" and before.main_pid is not None
        ending = Ending.of(entries, result=after.result, planned=stopping)
        return StopReport(True, seconds, after, ending, entries, killed_after=after_s)

    def _end(
        self,
        before: UnitState,
        cursor: str | None,
        limit: float,
        patience: float | None,
        tell: Callable[[Drain], object] | None,
    ) -> bool:
        """Have systemd stop the unit, follow what the server says meanwhile. True where it had to be killed."""
        begin, killed, said, rc = time.monotonic(), False, Drain(), None
        errors: list[bytes] = []
        follow = self.follow(after_cursor=cursor, invocation=before.invocation_id or None)
        with follow, self.session.stream(["systemctl", "stop", "--", self.unit], deadline=limit) as stopping:
            try:
                while rc is None and not stopping.ended:
                    event = stopping.get(_STOP_LOOK)
                    if event is not None and event[0].get("event") == "exit":
                        rc = int(event[0]["rc"])
                    elif event is not None:
                        errors.append(event[1])
                    if (
                        patience is not None
                        and not killed
                        and time.monotonic() - begin >= patience
                        and rc is None
                    ):
                        killed = True
                        self._kill()
                    for entry in follow.get(0.0) if tell is not None and not follow.ended else ():
                        if entry.source == "process" and said.feed(entry.message) and tell is not None:
                            tell(said)
            except DeadlineError as error:
                error.at(
                    host=self.session.host,
                    phase="stop",
                    state=f"{self.unit} was asked to stop and may still be running",
                    hint=f"ddtree-ops stop {self.session.host} --force",
                )
                raise
        if rc != 0:
            state = self.state()
            raise RemoteError(
                f"systemctl stop {self.unit} failed (exit status {rc})",
                host=self.session.host,
                phase="stop",
                state=state.describe(),
                hint=f"systemctl list-jobs; systemctl status {self.unit}",
                details=_lines(b"".join(errors)),
            )
        return killed

    def _kill(self) -> None:
        """SIGKILL to all its processes; the stop that is under way keeps systemd from starting it again."""
        (done,) = self._commands(
            _run("systemctl", "kill", "--kill-who=all", "--signal=SIGKILL", "--", self.unit)
        )
        if done.rc != 0 and self.state().active_state != "inactive":
            raise RemoteError(
                f"systemctl kill {self.unit} failed (exit status {done.rc})",
                host=self.session.host,
                phase="stop",
                details=_lines(done.stderr),
            )

    def restart(
        self, *, patience: float | None = None, drain: Callable[[Drain], object] | None = None
    ) -> StartReport:
        """Stop, then start: two steps, so that how it stopped is known and an old failure is cleared.

        :raises RemoteError: as :meth:`stop` and :meth:`start`.
        """
        stopped = self.stop(patience=patience, drain=drain)
        return replace(self.start(), stop=stopped)

    def _need_loaded(self, state: UnitState, phase: str) -> None:
        if state.loaded:
            return
        if not state.exists:
            raise NotDeployed(self.unit, self.session.host, acting=True, hint=self.writer)
        hint = f"systemd-analyze verify {state.fragment_path or self.unit}"
        if state.load_state == "masked":
            hint = f"systemctl unmask {self.unit}"
        raise RemoteError(
            state.describe(), host=self.session.host, phase=phase, state="nothing was changed", hint=hint
        )

    def _cursor(self, last: Completed) -> str | None:
        _check_journal_exit(last.rc, last.stderr, self.session.host)
        for line in last.stdout.splitlines():
            try:
                return str(json.loads(line)["__CURSOR"])
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def cursor(self) -> str | None:
        """Where the host's journal ends now; None where it holds nothing at all. One round trip."""
        return self._cursor(self._commands(_LAST_ENTRY)[0])

    def invocations(self) -> tuple[str, ...]:
        """Ids of the unit's runs, newest first, as far as systemd and the journal still know. One round trip."""
        runs = _run(
            "journalctl",
            "--output=json",
            "--quiet",
            "--no-pager",
            "--reverse",
            "--lines=500",
            "--output-fields=INVOCATION_ID,UNIT",
            f"UNIT={self.unit}",
            f"MESSAGE_ID={MessageId.STARTING}",
            f"MESSAGE_ID={MessageId.STARTED}",
        )
        shown, listed = self._commands(_show(self.unit), runs)
        _check_journal_exit(listed.rc, listed.stderr, self.session.host)
        current = self._state(shown).invocation_id
        found = dict.fromkeys([current] if current else [])
        found.update(dict.fromkeys(entry.invocation for entry in parse_entries([listed.stdout])))
        return tuple(name for name in found if name)

    def invocation(self, which: str) -> str | None:
        """An invocation id from ``current``, ``previous``, ``all`` (None), an id, or the first digits of one.

        :raises Inconclusive: there is no such run in systemd's memory or the journal.
        :raises UsageError: it is no id, or begins that of no run, or of several.
        """
        if which == "all":
            return None
        if which not in {"current", "previous"}:
            from ddtree_ops.service.runs import whole_id

            return which if len(which) == 32 else whole_id(which, self.invocations())
        known = self.invocations()
        place = 0 if which == "current" else 1
        if len(known) <= place:
            if not known and not self.state().exists:
                raise NotDeployed(self.unit, self.session.host, hint=self.writer)
            raise Inconclusive(
                f"no {which} run of {self.unit} is known to systemd or the journal",
                host=self.session.host,
                phase="journal",
                hint="did it ever run on this host? older runs may have been rotated away: journalctl --header",
            )
        return known[place]

    def _argv(
        self,
        invocation: str | None,
        since: str | None,
        until: str | None,
        lines: int | None,
        after_cursor: str | None,
        kernel: bool,
        follow: bool,
    ) -> list[str]:
        return journal_argv(
            self.unit,
            invocation=None if invocation is None else self.invocation(invocation),
            since=since,
            until=until,
            lines=lines,
            after_cursor=after_cursor,
            kernel=kernel,
            follow=follow,
        )

    def entries(
        self,
        *,
        invocation: str | None = None,
        since: str | None = None,
        until: str | None = None,
        lines: int | None = None,
        after_cursor: str | None = None,
        kernel: bool = False,
        deadline: float | None = 300.0,
        holding: Sequence[bytes] | None = None,
        tap: Callable[[bytes], object] | None = None,
    ) -> Entries:
        """Journal entries of both halves, streamed: nothing is held in memory but what is under way.

        :param invocation: ``current``, ``previous``, ``all`` or an id; see :func:`journal_argv` for the rest.
        :param deadline: seconds; None where the reader may take its time (a person with a pager).
        :param holding: as of :class:`~ddtree_ops.service.journal.EntryParser`.
        :param tap: is given journalctl's output too, in pieces, before it is parsed.
        :raises RemoteError: journalctl failed, or was not done within ``deadline`` seconds.
        """
        argv = self._argv(invocation, since, until, lines, after_cursor, kernel, follow=False)
        chunks = self._chunks(argv, deadline, tap)
        return parse_entries(chunks, after_cursor=after_cursor, holding=holding)

    def raw(
        self,
        *,
        invocation: str | None = None,
        since: str | None = None,
        until: str | None = None,
        kernel: bool = False,
        deadline: float | None = 300.0,
    ) -> Iterator[bytes]:
        """The same as ``journalctl -o json`` prints it, in pieces cut anywhere; parameters as of :meth:`entries`."""
        return self._chunks(self._argv(invocation, since, until, None, None, kernel, follow=False), deadline)

    def span(self, invocation: str | None) -> tuple[str, str] | None:
        """When one run wrote its first and its last entry, each for ``since`` and ``until``; None without an entry.

        Two round trips; the journal between them does not travel.
        """
        oldest = self.entries(invocation=invocation)
        try:
            first = next(oldest, None)
        finally:
            oldest.close()
        last = next(self.entries(invocation=invocation, lines=1), None)
        if first is None or last is None:
            return None
        return f"@{first.time.timestamp():.6f}", f"@{last.time.timestamp():.6f}"

    def _chunks(
        self, argv: list[str], deadline: float | None, tap: Callable[[bytes], object] | None = None
    ) -> Iterator[bytes]:
        stream = self.session.stream(argv, deadline=deadline)
        errors: list[bytes] = []
        rc: int | None = None
        try:
            for values, data in stream:
                match values.get("event"):
                    case "stdout":
                        if tap is not None:
                            tap(data)
                        yield data
                    case "stderr":
                        errors.append(data)
                    case "exit":
                        rc = int(values["rc"])
        finally:
            stream.close()
        if rc is None:
            raise RemoteError("the journal broke off in the middle", host=self.session.host, phase="journal")
        _check_journal_exit(rc, b"".join(errors), self.session.host)

    def follow(
        self,
        *,
        invocation: str | None = None,
        since: str | None = None,
        lines: int | None = None,
        after_cursor: str | None = None,
        kernel: bool = False,
        known: Iterable[str] = (),
    ) -> JournalFollower:
        """Entries as they are written, after the ones selected; with nothing selected, after the last ten.

        :param known: with ``after_cursor``, from :attr:`JournalFollower.place` of an earlier one.
        """
        if invocation is None and since is None and after_cursor is None and lines is None:
            lines = 10
        argv = self._argv(invocation, since, None, lines, after_cursor, kernel, follow=True)
        stream = self.session.stream(argv)
        return JournalFollower(stream, self.session.host, after_cursor=after_cursor, known=known)

    def search(
        self,
        pattern: str | None,
        *,
        invocation: str | None = None,
        since: str | None = None,
        until: str | None = None,
        lines: int | None = None,
        after_cursor: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
    ) -> SearchResult:
        """Search the unit's journal; see :func:`ddtree_ops.service.journal.search`.

        :raises Inconclusive: no readable entry; the error says which of the usual reasons it is.
        """
        entries = self.entries(
            invocation=invocation, since=since, until=until, lines=lines, after_cursor=after_cursor
        )
        try:
            return search(
                entries,
                pattern,
                ignore_case=ignore_case,
                literal=literal,
                what=f"journal of {self.unit}",
            )
        except Inconclusive:
            raise self.nothing(
                invocation=invocation, since=since, until=until, after_cursor=after_cursor
            ) from None

    def nothing(
        self,
        *,
        invocation: str | None = None,
        since: str | None = None,
        until: str | None = None,
        after_cursor: str | None = None,
    ) -> Inconclusive:
        """Why the journal gave no entry for what was asked: an error to raise. One round trip."""
        shown, last = self._commands(_show(self.unit), _LAST_ENTRY)
        state, cursor = self._state(shown), self._cursor(last)
        if cursor is None:
            reason = (
                "the host's journal holds nothing that we may read: is journald storing, are we root there?"
            )
        elif not state.exists:
            reason = f"{self.unit} does not exist on this host"
        elif since is not None or until is not None:
            reason = (
                "the journal is readable and the unit exists, and nothing was written in the time asked for"
            )
        elif invocation not in (None, "all", "current", "previous"):
            reason = f"no entry of invocation {invocation} is there: it is no run of this unit, or was rotated away"
        elif after_cursor is not None:
            reason = "the journal is readable and the unit exists: nothing was written since then"
        else:
            reason = (
                "the journal is readable and the unit exists: it never ran, or its entries were rotated away"
            )
        return Inconclusive(
            f"nothing to search: {reason}",
            host=self.session.host,
            phase="journal",
            details=(state.describe(),) if state.exists else (),
            hint=f"ddtree-ops logs {self.session.host} --invocation all" if state.exists else self.writer,
        )

    def port_owner(self, port: int, address: str | None = None) -> tuple[PortOwner, ...]:
        """Who listens on a TCP port of the host; empty: nobody. One round trip.

        :param address: only listeners that a connection to this IP address would reach, or that keep a server from
            binding it: those on the address itself and on the wildcard ones. Left out: all.

        Read from ``/proc`` by a small program that the agent runs: ``ss`` is not everywhere, and does not
        say which unit a process belongs to.

        :raises RemoteError: the program failed.
        """
        if not 0 < port < 65536:
            raise UsageError(f"{port} is not a port")
        if address is not None:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise UsageError(f"{address!r} is not an IP address") from None
        reply = self.session.request("program", {"name": "listeners", "given": port}, data=_LISTENERS)
        return tuple(
            owner for owner in _owners(reply.data) if address is None or _reaches(owner.address, address)
        )


def _reaches(listening: str, address: str) -> bool:
    here, wanted = ipaddress.ip_address(listening), ipaddress.ip_address(address)
    if isinstance(here, ipaddress.IPv6Address) and here.ipv4_mapped:
        here = here.ipv4_mapped
    return here == wanted or here.is_unspecified or wanted.is_unspecified


def _owners(answer: bytes) -> tuple[PortOwner, ...]:
    owners: list[PortOwner] = []
    for found in json.loads(answer):
        address = str(ipaddress.ip_address(bytes.fromhex(found["raw"])))
        for pid, command, group in found["pids"] or [(0, "", "")]:
            parts = [part for line in group.splitlines() for part in line.split(":", 2)[-1].split("/")]
            unit = next((part for part in reversed(parts) if part.endswith(".service")), "")
            owners.append(PortOwner(pid, command, unit, address, found["uid"]))
    return tuple(owners)
