"""Wait until a started service is ready, dead, or too slow: the sources around :mod:`ddtree_ops.checks.readiness`.

Three sources run at once: the unit's state (changes are seen within about 0.2 s), the journal of this invocation as it
is written, and, only once the port could be open, ``GET /health``: one request at a time, at least 2 s apart and further
apart with every try, since each makes the server generate a token and unanswered ones pile up in it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from ddtree_ops.checks.engine import EngineClient, EngineError
from ddtree_ops.checks.port import PortHolders, port_holders
from ddtree_ops.checks.readiness import Failed, Readiness, Ready, TimedOut, duration
from ddtree_ops.errors import CheckFailed, HealthTimeout, OpsError, RemoteError, UnreachableError
from ddtree_ops.inventory.models import Target
from ddtree_ops.remote.session import Session, Stream
from ddtree_ops.results import CheckResult, Event, EventKind, Evidence, Reporter, Verdict
from ddtree_ops.secret import Secret
from ddtree_ops.service.control import JournalFollower, UnitControl
from ddtree_ops.service.state import UnitState

__all__ = ["Pace", "ReadyReport", "StartFailed", "StartTimeout", "wait_ready"]

HEARTBEAT = 30.0
"""Seconds after which an event is emitted although nothing changed."""
GAP = 0.25
"""Least seconds between two events."""
_HTTP_FIRST, _HTTP_LAST, _HTTP_GROWTH, _HTTP_TIMEOUT = 2.0, 15.0, 1.4, 25.0
_PORT_RECHECK, _PORT_PATIENCE = 1.0, 30.0
_LAST_WORDS = 0.4
_STOP_CHECK = 0.2


class Pace:
    """When is a progress event due? On every change, at most once in :data:`GAP`, and after :data:`HEARTBEAT` anyway."""

    def __init__(self) -> None:
        self._said: object = None
        self._at = float("-inf")

    def due(self, key: object, now: float) -> bool:
        """True where an event with this content is due at ``now``; it then counts as emitted."""
        gap = GAP if key != self._said else HEARTBEAT
        if now - self._at < gap:
            return False
        self._said, self._at = key, now
        return True


@dataclass(frozen=True)
class ReadyReport:
    """How the wait went. Times are seconds.

    :param ready_s: from the beginning of the wait to its end.
    :param phases: seconds spent in each phase, in order.
    :param http_polls: requests made to ``/health``.
    :param evidence: what said that the service is ready, or how it failed.
    """

    host: str
    unit: str
    ready_s: float
    phases: Mapping[str, float]
    invocation: str
    main_pid: int
    http_polls: int
    journal_lines: int
    evidence: str
    phase: str
    port: PortHolders | None = None
    last_words: str = ""
    unit_state: UnitState | None = field(default=None, repr=False)

    def result(self) -> CheckResult:
        """As a passed check named ``ready``."""
        slowest = max(self.phases, key=lambda name: self.phases[name], default="start")
        return CheckResult(
            "ready",
            Verdict.PASS,
            f"ready after {duration(self.ready_s)} (longest: {slowest}, {duration(self.phases.get(slowest, 0.0))})",
            host=self.host,
            facts={
                "ready_s": round(self.ready_s, 3),
                "phases_s": dict(self.phases),
                "invocation": self.invocation,
                "main_pid": self.main_pid,
                "http_polls": self.http_polls,
                "journal_lines": self.journal_lines,
            },
            evidence=(
                Evidence("journal" if "GET" not in self.evidence else "http", self.evidence),
                *((Evidence("listening sockets", self.port.describe()),) if self.port else ()),
            ),
        )


class StartFailed(CheckFailed):
    """The service will not become ready. ``kind`` as in :data:`ddtree_ops.checks.readiness.FailureKind`."""

    def __init__(self, message: str, *, kind: str, report: ReadyReport, **more: Any) -> None:
        super().__init__(message, **more)
        self.kind = kind
        self.report = report


class StartTimeout(HealthTimeout):
    """Not ready in time: ``kind`` is ``load`` (the hard limit) or ``stall`` (no progress)."""

    def __init__(
        self, message: str, *, kind: Literal["load", "stall"], report: ReadyReport, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.kind = kind
        self.report = report


@dataclass(frozen=True)
class _Item:
    kind: Literal["unit", "tick", "line", "http", "error", "unit-end", "journal-end"]
    value: Any = None


class _Sources:
    """The threads that fill one queue."""

    def __init__(self, session: Session, target: Target, api_key: Secret | None) -> None:
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self.polls = 0
        self._session = session
        self._target = target
        self._stop = threading.Event()
        self._http_open = threading.Event()
        self._streams = ExitStack()
        self._threads: list[threading.Thread] = []
        self._client = EngineClient(session, target, api_key)

    def start_unit(self) -> None:
        """Watch the unit."""
        stream = self._session.watch_unit(self._target.service.unit)
        self._run("watch", lambda: self._watch(stream), stream)

    def start_journal(self, invocation: str, after_cursor: str | None) -> None:
        """Follow the journal of one invocation, from its beginning (or from ``after_cursor``)."""
        control = UnitControl(self._session, self._target.service.unit)
        follower = control.follow(invocation=invocation, after_cursor=after_cursor)
        self._run("journal", lambda: self._follow(follower), follower)

    def start_http(self) -> None:
        """Let the polling begin."""
        if not self._http_open.is_set():
            self._http_open.set()
            self._run("http", self._poll, None)

    def _run(self, name: str, work: Callable[[], None], stream: Stream | JournalFollower | None) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                if not self._stop.is_set():
                    self.items.put(_Item("error", error))

        if stream is not None:
            self._streams.callback(stream.close)
        thread = threading.Thread(target=guarded, name=f"wait-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, stream: Stream) -> None:
        while not self._stop.is_set():
            event = stream.get(_STOP_CHECK)
            if event is None:
                if stream.ended:
                    break
                continue
            values = event[0]
            if values.get("event") == "unit":
                self.items.put(_Item("unit", values["properties"]))
            elif values.get("event") == "tick":
                self.items.put(_Item("tick", int(values.get("read_bytes") or 0)))
        if not self._stop.is_set():
            self.items.put(_Item("unit-end"))

    def _follow(self, follower: JournalFollower) -> None:
        problem = "journalctl ended"
        try:
            while not self._stop.is_set() and not follower.ended:
                for entry in follower.get(_STOP_CHECK):
                    self.items.put(_Item("line", entry.message))
        except RemoteError as error:
            problem = error.message
        if not self._stop.is_set():
            self.items.put(_Item("journal-end", problem))

    def _poll(self) -> None:
        gap = _HTTP_FIRST
        while not self._stop.wait(gap):
            self.polls += 1
            begun = time.monotonic()
            try:
                status = self._client.health(timeout=_HTTP_TIMEOUT)
            except EngineError:
                status = None
            self.items.put(_Item("http", status))
            gap = max(min(gap * _HTTP_GROWTH, _HTTP_LAST), time.monotonic() - begun)

    def close(self, patience: float) -> None:
        """End the streams on the host too; wait up to ``patience`` seconds for a request under way to come back."""
        self._stop.set()
        self._streams.close()
        end = time.monotonic() + patience
        for thread in self._threads:
            if thread.is_alive():  # an interruption may have kept it from being started
                thread.join(max(0.0, end - time.monotonic()))
        self._client.close()


def wait_ready(
    session: Session,
    target: Target,
    *,
    report: Reporter,
    invocation: str | None = None,
    since_cursor: str | None = None,
    load_timeout: float | None = None,
    stall_timeout: float | None = None,
    api_key: Secret | None = None,
    clock: Callable[[], float] = time.monotonic,
    look: Callable[[], None] | None = None,
    phase: str = "wait",
) -> ReadyReport:
    """Follow a start until the service is ready and owns its port.

    :param report: gets PROGRESS events on every change (at most four a second) and every 30 s without one, and NOTEs;
        the START and the DONE of the step are the caller's.
    :param invocation: the run to wait for, as ``start`` returned it; left out, the one that is seen first.
    :param since_cursor: read the journal from behind this cursor instead of from the invocation's beginning.
    :param load_timeout: seconds; left out, the inventory's ``health.load_timeout``; ``stall_timeout`` likewise.
    :param clock: monotonic seconds.
    :param look: called several times a second; what it raises ends the wait.
    :raises StartFailed: (exit 5) the unit failed, restarts, was stopped, or its port is somebody else's; raised within
        a second of the death.
    :raises StartTimeout: (exit 3) no progress for ``stall_timeout``, or not ready within ``load_timeout``.
    :raises UnreachableError: the session ended.
    """
    health, host, unit = target.service.health, target.host.name, target.service.unit
    begun = clock()
    machine = Readiness(
        health.load_timeout if load_timeout is None else load_timeout,
        health.stall_timeout if stall_timeout is None else stall_timeout,
        begun,
        invocation,
    )
    latest: UnitState | None = None
    holders: PortHolders | None = None
    sources = _Sources(session, target, api_key)
    pace = Pace()
    port_at, ready_at = begun - _PORT_RECHECK, 0.0
    control = UnitControl(session, unit)
    following = False

    def summary(evidence: str) -> ReadyReport:
        return ReadyReport(
            host=host,
            unit=unit,
            ready_s=clock() - begun,
            phases=machine.phase_seconds(),
            invocation=machine.invocation,
            main_pid=machine.main_pid,
            http_polls=sources.polls,
            journal_lines=machine.lines,
            evidence=evidence,
            phase=machine.phase,
            port=holders,
            last_words=machine.last_words,
            unit_state=latest,
        )

    def take(item: _Item, now: float) -> None:
        nonlocal latest
        match item.kind:
            case "unit":
                latest = UnitState.parse(item.value)
                machine.feed_unit(latest, now)
            case "tick":
                machine.feed_tick(item.value, now)
            case "line":
                machine.feed_line(item.value, now)
            case "http":
                machine.feed_http("/health", item.value, now)
            case "journal-end":
                text = f"the journal cannot be followed any more: {item.value}"
                report(Event(EventKind.NOTE, host, phase, text))
            case "unit-end":
                raise UnreachableError(
                    "the watch on the unit ended", host=host, phase=phase, state=_state(latest)
                )
            case "error":
                raise item.value

    def failed(reason: str, kind: str) -> StartFailed:
        details = [f"got to: {machine.describe()}"]
        if machine.last_words and not machine.last_words.endswith("(most recent call last):"):
            details.append(f"the engine said: {machine.last_words}")
        return StartFailed(
            reason,
            kind=kind,
            report=summary(reason),
            host=host,
            phase=phase,
            state=_state(latest),
            hint=f"ddtree-ops deploy {host}"
            if kind == "not-found"
            else f"ddtree-ops logs {host} --invocation {machine.invocation or 'current'}",
            details=tuple(details),
        )

    patience = 0.0
    try:
        sources.start_unit()
        while True:
            try:
                take(sources.items.get(timeout=GAP), clock())
                while True:
                    take(sources.items.get_nowait(), clock())
            except queue.Empty:
                pass
            now = clock()
            if look is not None:
                look()
            if machine.invocation and not following:
                following = True
                sources.start_journal(machine.invocation, since_cursor)
            if machine.http_possible:
                sources.start_http()
            match machine.poll(now):
                case Ready(evidence) if latest is not None and now - port_at >= _PORT_RECHECK:
                    port_at = now
                    holders = port_holders(control, target.service)
                    if holders.owned:
                        patience = 3.0
                        return summary(evidence)
                    ready_at = ready_at or now
                    if holders.others or now - ready_at >= _PORT_PATIENCE:
                        raise failed(f"it says it is ready, but {holders.describe()}", "port")
                case Failed(reason, kind):
                    _drain(sources.items, take, clock)
                    raise failed(reason, kind)
                case TimedOut(reason, late):
                    raise StartTimeout(
                        reason,
                        kind=late,
                        report=summary(reason),
                        host=host,
                        phase=phase,
                        state=_state(latest),
                        hint=f"ddtree-ops logs {host} --invocation {machine.invocation or 'current'} --lines 50; "
                        f"a longer {late}_timeout is set under health: in the inventory",
                        details=(f"got to: {machine.describe()}",),
                    )
            if pace.due((machine.phase, machine.shards, machine.graphs, machine.active), now):
                text = machine.describe()
                if now - machine.progress_at >= HEARTBEAT:
                    text += f"; last progress {duration(now - machine.progress_at)} ago"
                report(Event(EventKind.PROGRESS, host, phase, text, fraction=machine.fraction))
    except OpsError as error:
        raise error.at(host=host, phase=phase) from None
    finally:
        sources.close(patience)


def _drain(
    items: queue.SimpleQueue[_Item], take: Callable[[_Item, float], None], clock: Callable[[], float]
) -> None:
    """The journal may lag behind the unit's state: take in what the engine still said, for a moment."""
    end = time.monotonic() + _LAST_WORDS
    while (left := end - time.monotonic()) > 0:
        try:
            item = items.get(timeout=left)
        except queue.Empty:
            return
        if item.kind == "line":
            take(item, clock())
            if "Failed with result" in item.value or "Deactivated successfully" in item.value:
                return


def _state(unit: UnitState | None) -> str:
    return unit.describe() if unit is not None else "the state of the unit is not known"
