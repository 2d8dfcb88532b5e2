"""Progress events as a live display on a terminal and as plain lines elsewhere.

Off a terminal a phase that keeps talking yields at most one line every :data:`LINE_EVERY_S` seconds, and one that
says nothing is named at least every :data:`SILENCE_S` seconds, so that a CI log is neither flooded nor silent.
With more than :data:`MANY` hosts, phases are no lines any more: what failed, notes and each host's end are, and where
all of them stand is told every :data:`SUMMARY_EVERY_S` seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ddtree_ops.report.typed import typed
from ddtree_ops.results import RUN_END, Event, EventKind

if TYPE_CHECKING:
    from ddtree_ops.report.live import LiveProgress
    from ddtree_ops.report.output import Output

__all__ = [
    "LINE_EVERY_S",
    "MANY",
    "SILENCE_S",
    "SUMMARY_EVERY_S",
    "Fleet",
    "LineProgress",
    "duration",
    "progress_for",
]

MANY = 6
LINE_EVERY_S = 5.0
SUMMARY_EVERY_S = 15.0
SILENCE_S = 25.0


def duration(seconds: float) -> str:
    """``0.4s``, ``12s``, ``3m12s``, ``1h02m``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


class Fleet:
    """Where each of many hosts stands: what it does now, or how it ended. Not safe for threads by itself.

    :param hosts: how many there are.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.running: dict[str, tuple[Event, float]] = {}
        self._ended: dict[str, bool] = {}

    def see(self, event: Event, now: float) -> bool:
        """Take an event in; whether it is worth a line of its own."""
        if event.phase == RUN_END:
            self.running.pop(event.host, None)
            self._ended[event.host] = event.kind is not EventKind.FAIL
            return True
        if event.kind in (EventKind.START, EventKind.PROGRESS) and event.host not in self._ended:
            before = self.running.get(event.host)
            same = before is not None and before[0].phase == event.phase
            if same or event.kind is EventKind.START:
                self.running[event.host] = (event, before[1] if before is not None and same else now)
        return event.kind in (EventKind.FAIL, EventKind.UNSURE, EventKind.NOTE)

    def summary(self) -> str:
        """``12 of 30 done, 1 of them failed; under way: 9 wait, 8 push``."""
        failed = sum(not passed for passed in self._ended.values())
        text = f"{len(self._ended)} of {self.hosts} done" + (f", {failed} of them failed" if failed else "")
        phases: dict[str, int] = {}
        for event, _ in self.running.values():
            phases[event.phase] = phases.get(event.phase, 0) + 1
        under_way = ", ".join(
            f"{count} {phase}" for phase, count in sorted(phases.items(), key=lambda one: -one[1])
        )
        return f"{text}; under way: {under_way}" if under_way else text


class LineProgress:
    """One line an event, with the time of day in UTC; for files, pipes and CI logs.

    :param write: is given each line, without its line break.
    :param hosts: how many there are.
    """

    def __init__(
        self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic, hosts: int = 1
    ) -> None:
        self._fleet = Fleet(hosts) if hosts > MANY else None
        self._summed = clock()
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], float] = {}
        self._running: dict[tuple[str, str], tuple[float, Event]] = {}
        self._over = threading.Event()

    def __call__(self, event: Event) -> None:
        """Print the event, unless the same phase has just printed a progress line."""
        with self._lock:
            key = (event.host, event.phase)
            now = self._clock()
            if self._fleet is not None and not self._fleet.see(event, now):
                return
            if self._fleet is None and event.kind is EventKind.START:
                self._running[key] = (now, event)
            elif self._fleet is None and event.kind is EventKind.PROGRESS:
                if key in self._running:
                    self._running[key] = (self._running[key][0], event)
            elif event.kind is not EventKind.NOTE:
                self._running.pop(key, None)
            if event.kind is EventKind.PROGRESS and now - self._last.get(key, -LINE_EVERY_S) < LINE_EVERY_S:
                return
            self._last[key] = now
            took = f" ({duration(event.elapsed_s)})" if event.elapsed_s is not None else ""
            word = {
                EventKind.DONE: "ok",
                EventKind.FAIL: "FAILED",
                EventKind.UNSURE: "INCONCLUSIVE",
                EventKind.START: "...",
                EventKind.NOTE: "note",
            }
            state = word.get(event.kind, "...")
            self._print(event, state, took)

    def beat(self) -> None:
        """Name the phases that have said nothing for :data:`SILENCE_S` seconds."""
        with self._lock:
            now = self._clock()
            if self._fleet is not None and now - self._summed >= SUMMARY_EVERY_S:
                self._summed = now
                self._write(f"{datetime.now(UTC):%H:%M:%SZ} {self._fleet.summary()}")
            for key, (since, event) in self._running.items():
                if now - self._last[key] >= SILENCE_S:
                    self._last[key] = now
                    self._print(event, "still", f" ({duration(now - since)} so far)")

    def _print(self, event: Event, state: str, tail: str) -> None:
        where = f"{event.host} {event.phase}".strip()
        line = f"{datetime.now(UTC):%H:%M:%SZ} {where}: {state} {typed(event.message)}".rstrip()
        self._write(line + tail)

    def _beat(self) -> None:
        while not self._over.wait(LINE_EVERY_S):
            self.beat()

    def __enter__(self) -> Self:
        threading.Thread(target=self._beat, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()


def progress_for(output: Output, hosts: int = 1) -> LineProgress | LiveProgress:
    """The live display on a terminal, plain lines elsewhere.

    :param hosts: how many will be told of.
    """
    if not output.is_terminal:
        return LineProgress(output.write_line, hosts=hosts)
    from ddtree_ops.report.live import LiveProgress

    return LiveProgress(output.console, hosts=hosts)
