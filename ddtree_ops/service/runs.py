"""The runs of a unit, as the journal tells them: when each began and ended, and whether anybody asked for its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile

from ddtree_ops.errors import UsageError
from ddtree_ops.service.journal import Entry, MessageId

__all__ = ["RUN_MESSAGES", "Chosen", "Run", "choose", "parse_runs", "whole_id"]

RUN_MESSAGES = (
    MessageId.STARTING,
    MessageId.STARTED,
    MessageId.STOPPING,
    MessageId.EXITED,
    MessageId.FAILED,
    MessageId.SUCCEEDED,
    MessageId.STOPPED,
    MessageId.OUT_OF_MEMORY,
    MessageId.RESTART_SCHEDULED,
)
"""``MESSAGE_ID`` of the entries that :func:`parse_runs` needs."""

_BACK = 4
_SHOWN = 8
_WHOLE = re.compile(r"[0-9a-f]{32}")
_SHORT = re.compile(r"[0-9a-f]{6,31}")
_RECENT = timedelta(days=1)
"""A crash that long ago, at most so many runs back, is worth a word where the newest run is sound."""
_ENDS = frozenset({MessageId.EXITED, MessageId.FAILED, MessageId.SUCCEEDED, MessageId.STOPPED})


@dataclass(frozen=True)
class Run:
    """One run of a unit. Times are UTC by the host's clock, None: the journal does not tell.

    :param id: ``InvocationID``.
    :param planned: a stop was asked for.
    :param failed: systemd says that it failed (a planned stop of sglang does, too).
    :param restarts: systemd scheduled this many automatic restarts in a row after it; 0: none.
    """

    id: str
    begin: datetime | None = None
    end: datetime | None = None
    planned: bool = False
    failed: bool = False
    restarts: int = 0

    @property
    def crashed(self) -> bool:
        """It ended although nobody had asked for it."""
        return self.failed and not self.planned


@dataclass(frozen=True)
class Chosen:
    """The run to explain.

    :param until: when it was surely over, for the kernel's log; None: it still runs, or that is not known.
    :param note: why it is another one than was asked for; empty otherwise.
    """

    run: Run
    until: datetime | None = None
    note: str = ""


def parse_runs(entries: Iterable[Entry], current: str = "") -> tuple[Run, ...]:
    """Runs from systemd's entries about the unit in any order, newest first.

    :param current: ``InvocationID`` that systemctl shows; it is the newest even where the journal lost its start.
    """
    runs: dict[str, Run] = {}
    for entry in sorted(entries, key=lambda entry: entry.time):
        if not entry.invocation:
            continue
        run = runs.setdefault(entry.invocation, Run(entry.invocation))
        kind = entry.message_id
        if kind in (MessageId.STARTING, MessageId.STARTED):
            run = replace(run, begin=run.begin or entry.time)
        elif kind == MessageId.STOPPING:
            run = replace(run, planned=run.planned or run.end is None)
        elif kind == MessageId.RESTART_SCHEDULED:
            count = entry.fields.get("N_RESTARTS", "")
            run = replace(run, restarts=int(count) if count.isdigit() else 1)
        elif kind == MessageId.OUT_OF_MEMORY:
            run = replace(run, failed=True)
        elif kind in _ENDS:
            run = replace(run, end=entry.time, failed=run.failed or kind == MessageId.FAILED)
        runs[entry.invocation] = run
    newest = list(reversed(runs.values()))
    if current:
        newest.sort(key=lambda run: run.id != current)
        if not newest or newest[0].id != current:
            newest.insert(0, Run(current))
    return tuple(newest)


def whole_id(text: str, known: Sequence[str]) -> str:
    """The ``InvocationID`` that ``text`` is, or begins: six digits and more are enough where one known run has them.

    :param known: ids of the runs that are known, newest first. An id of 32 digits need not be among them.
    :raises UsageError: it is none, or begins none or several; the known runs are named.
    """
    wanted = text.lower().replace("-", "")
    if _WHOLE.fullmatch(wanted):
        return wanted
    found = [name for name in known if name.startswith(wanted)] if _SHORT.fullmatch(wanted) else []
    if len(found) == 1:
        return found[0]
    if found:
        what = f"{len(found)} runs begin with {text!r}"
    elif _SHORT.fullmatch(wanted):
        what = f"no run that is known begins with {text!r}"
    else:
        what = f"{text!r} is not an invocation id: 32 hex digits, or the first six and more of them"
    shown = ", ".join(name[:12] for name in (found or known)[:_SHOWN])
    hint = f"runs that are known, newest first: {shown}" if shown else "no run is known here"
    raise UsageError(what, hint=hint)


def choose(
    runs: tuple[Run, ...], which: str, *, now: datetime, young: timedelta, state: str = ""
) -> Chosen | None:
    """The run that ``current``, ``previous`` or an id stands for; None: there is no such run.

    :param state: ``ActiveState`` and ``SubState`` of the unit, with a blank between; empty: not known.

    A ``current`` or ``previous`` run that systemd began by itself after a crash, and that is (or was, at its end) younger than
    ``young``, tells nothing yet: then the run that crashed is taken, and the note says so.
    """
    if which not in ("current", "previous"):
        known = next((run for run in runs if run.id == which), Run(which))
        return Chosen(known, _until(runs, known))
    place = 0 if which == "current" else 1
    if len(runs) <= place:
        return None
    run = runs[place]
    before = runs[place + 1] if len(runs) > place + 1 else None
    lived = (run.end or now) - run.begin if run.begin else timedelta.max
    if before is not None and before.crashed and before.restarts and not run.crashed and lived < young:
        state = "was stopped" if run.end else f"is {_span(lived)} old"
        note = (
            f"explained is the run {before.id[:12]} that crashed: the run after it, {run.id[:12]}, is automatic restart "
            f"{before.restarts} of systemd and {state} (it: --invocation {run.id})"
        )
        return Chosen(before, _until(runs, before), note)
    note = ""
    if place == 0 and run.crashed:
        ended = f" at {run.end:%Y-%m-%d %H:%M:%SZ}" if run.end else ""
        note = f"the unit does not run: explained is its last run {run.id[:12]}, which failed{ended}{_next(runs, state)}"
    elif place == 0:
        earlier = next(
            (one for one in runs[1:_BACK] if one.crashed and one.end and now - one.end < _RECENT), None
        )
        if earlier is not None:
            note = f"an earlier run crashed at {earlier.end:%Y-%m-%d %H:%M:%SZ}: --invocation {earlier.id} explains it"
    return Chosen(run, _until(runs, run), note)


def _next(runs: tuple[Run, ...], state: str) -> str:
    """What systemd does about a last run that crashed."""
    row = len(list(takewhile(lambda run: run.crashed, runs)))
    times = f", crash {row} in a row" if row > 1 else ""
    if state.startswith("activating"):
        return f"{times}; systemd is about to start it again"
    if row > 1 and state.startswith("failed") and runs[1].restarts:
        return f"{times}; systemd has given up restarting it (start limit)"
    return times


def _until(runs: tuple[Run, ...], run: Run) -> datetime | None:
    if run.end is not None:
        return run.end
    newer = [one for one in runs[: runs.index(run)] if one.begin] if run in runs else []
    return newer[-1].begin if newer else None


def _span(lived: timedelta) -> str:
    seconds = int(lived.total_seconds())
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
