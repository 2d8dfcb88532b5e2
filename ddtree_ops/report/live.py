"""The live display of progress, for terminals."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ddtree_ops.report.progress import MANY, Fleet, duration
from ddtree_ops.report.summary import folded
from ddtree_ops.report.typed import typed
from ddtree_ops.results import Event, EventKind

__all__ = ["LiveProgress"]

_LONG = 48
"""Columns; what begins a line leaves too little of the usual 80 where it is longer."""
_MARKS = {
    EventKind.DONE: ("✓", "green"),
    EventKind.FAIL: ("✗", "bold red"),
    EventKind.UNSURE: ("?", "bold yellow"),
    EventKind.NOTE: ("·", "dim"),
}


class LiveProgress:
    """Finished phases scroll by; what is under way stays at the bottom with a bar or a spinner.

    With many hosts only failures, notes and each host's end scroll by; at the bottom every host under way has one
    line, no more of them than the terminal holds, under a count of all.

    :param hosts: how many there are.
    """

    def __init__(self, console: Console, *, hosts: int = 1) -> None:
        self._console = console
        self._fleet = Fleet(hosts) if hosts > MANY else None
        self._spinner = Spinner("dots")
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], tuple[Event, float, Spinner]] = {}
        self._finished: set[tuple[str, str]] = set()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8, transient=True)

    def __call__(self, event: Event) -> None:
        """Update the display."""
        if self._fleet is not None:
            with self._lock:
                telling = self._fleet.see(event, time.monotonic())
            if telling:
                _print_finished(self._console, event)
            return
        key = (event.host, event.phase)
        with self._lock:
            if event.kind is EventKind.PROGRESS and key in self._finished:
                return
            if event.kind in (EventKind.START, EventKind.PROGRESS):
                self._finished.discard(key)
                _, since, spinner = self._running.get(key, (event, time.monotonic(), Spinner("dots")))
                self._running[key] = (event, since, spinner)
                return
            if event.kind is not EventKind.NOTE:
                self._running.pop(key, None)
                self._finished.add(key)
        _print_finished(self._console, event)

    def _render(self) -> RenderableType:
        if self._fleet is not None:
            return self._render_fleet(self._fleet)
        with self._lock:
            running = list(self._running.values())
        return Group(*(_running_line(event, since, spinner) for event, since, spinner in running))

    def _render_fleet(self, fleet: Fleet) -> RenderableType:
        with self._lock:
            rows = sorted(fleet.running.values(), key=lambda row: row[1])
            summary = fleet.summary()
        room = max(self._console.height - 4, 3)
        lines = [_running_line(event, since, self._spinner) for event, since in rows[:room]]
        more = [Text(f"  and {len(rows) - room} more", "dim")] if len(rows) > room else []
        return Group(*lines, *more, Text(summary, "bold"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with self._lock:
            self._running.clear()
            self._fleet = None
        self._live.stop()


def _print_finished(console: Console, event: Event) -> None:
    """What it took and what came of it; a long message is folded between words, under itself, and nothing is cut off.

    Behind the long name of a host there is no room for that: it then stands below.
    """
    mark, style = _MARKS[event.kind]
    took = f"{duration(event.elapsed_s):>6}" if event.elapsed_s is not None else " " * 6
    head = Text.assemble(
        (f"{mark} ", style),
        (f"{event.host:<8} ", "cyan"),
        (f"{event.phase:<10} ", "bold"),
        (f"{took}  ", "dim"),
    )
    message = Text(typed(event.message), "red" if event.kind is EventKind.FAIL else "")
    below = head.cell_len > _LONG and head.cell_len + message.cell_len > console.width
    indent = 4 if below else head.cell_len
    lines = [head] if below else []
    for part in folded(message, max(console.width - indent, 20)):
        lines.append((Text(" " * indent) if lines else head).append_text(part))
    console.print(Text("\n").join(lines), soft_wrap=True)


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
