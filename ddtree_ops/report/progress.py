"""Progress events as a live display on a terminal and as plain lines elsewhere.

Off a terminal a phase that keeps talking yields at most one line every :data:`LINE_EVERY_S` seconds, and one that
says nothing is named at least every :data:`SILENCE_S` seconds, so that a CI log is neither flooded nor silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ddtree_ops.results import Event, EventKind

__all__ = ["LINE_EVERY_S", "SILENCE_S", "LineProgress", "LiveProgress", "duration", "progress_for"]

LINE_EVERY_S = 5.0
SILENCE_S = 25.0

_MARKS = {EventKind.DONE: ("✓", "green"), EventKind.FAIL: ("✗", "bold red"), EventKind.NOTE: ("·", "dim")}


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


class LineProgress:
    """One line an event, with the time of day in UTC; for files, pipes and CI logs."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
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
            if event.kind is EventKind.START:
                self._running[key] = (now, event)
            elif event.kind is EventKind.PROGRESS:
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
                EventKind.START: "...",
                EventKind.NOTE: "note",
            }
            state = word.get(event.kind, "...")
            self._print(event, state, took)

    def beat(self) -> None:
        """Name the phases that have said nothing for :data:`SILENCE_S` seconds."""
        with self._lock:
            now = self._clock()
            for key, (since, event) in self._running.items():
                if now - self._last[key] >= SILENCE_S:
                    self._last[key] = now
                    self._print(event, "still", f" ({duration(now - since)} so far)")

    def _print(self, event: Event, state: str, tail: str) -> None:
        line = f"{datetime.now(UTC):%H:%M:%SZ} {event.host} {event.phase}: {state} {event.message}".rstrip()
        self._console.print(line + tail, markup=False, highlight=False, soft_wrap=True)

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


class LiveProgress:
    """Finished phases scroll by; what is under way stays at the bottom with a bar or a spinner."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], tuple[Event, float, Spinner]] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __call__(self, event: Event) -> None:
        """Update the display."""
        key = (event.host, event.phase)
        with self._lock:
            if event.kind in (EventKind.START, EventKind.PROGRESS):
                _, since, spinner = self._running.get(key, (event, time.monotonic(), Spinner("dots")))
                self._running[key] = (event, since, spinner)
                return
            if event.kind is not EventKind.NOTE:
                self._running.pop(key, None)
        self._console.print(_finished_line(event))

    def _render(self) -> RenderableType:
        with self._lock:
            running = list(self._running.values())
        return Group(*(_running_line(event, since, spinner) for event, since, spinner in running))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with self._lock:
            self._running.clear()
        self._live.stop()


def _finished_line(event: Event) -> Text:
    mark, style = _MARKS[event.kind]
    took = f"{duration(event.elapsed_s):>6}" if event.elapsed_s is not None else " " * 6
    return Text.assemble(
        (f"{mark} ", style), (f"{event.host:<8} ", "cyan"), (f"{event.phase:<10} ", "bold"), (f"{took}  ", "dim"),
        (event.message, "red" if event.kind is EventKind.FAIL else ""),
    )  # fmt: skip


def _running_line(event: Event, since: float, spinner: Spinner) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    took = duration(time.monotonic() - since)
    cells: list[RenderableType] = [
        spinner,
        Text(f"{event.host:<8}", "cyan"),
        Text(f"{event.phase:<10}", "bold"),
    ]
    cells.append(Text(f"{took:>6}", "dim"))
    if event.fraction is not None:
        cells.append(ProgressBar(total=1.0, completed=event.fraction, width=24))
    cells.append(Text(event.message, overflow="ellipsis", no_wrap=True))
    line.add_row(*cells)
    return line


def progress_for(console: Console) -> LineProgress | LiveProgress:
    """The live display on a terminal, plain lines elsewhere."""
    return LiveProgress(console) if console.is_terminal else LineProgress(console)
