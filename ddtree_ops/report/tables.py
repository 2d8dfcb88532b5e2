"""What runs on many hosts, on one screen: drift and status, for terminals of any width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ddtree_ops.deploy.drift import DriftReport, Severity
from ddtree_ops.deploy.history import Activation
from ddtree_ops.deploy.status import Patch, Status
from ddtree_ops.errors import ExitCode
from ddtree_ops.report.summary import indented, say, table_lines
from ddtree_ops.wording import count, moment_of

__all__ = ["ago", "print_drift", "print_status"]

_SEVERITY = {Severity.ERROR: ("✗", "bold red"), Severity.WARN: ("!", "yellow"), Severity.INFO: ("·", "dim")}


def print_drift(console: Console, reports: Sequence[DriftReport]) -> None:
    """Every finding with what should be, what is, the names concerned and the next command."""
    for report in reports:
        head = Text.assemble((f"{report.host} ", "bold cyan"), f"{report.unit}  ")
        if not report.deployed:
            say(console, head.append("never deployed: nothing to judge", "yellow"))
            indented(console, f"next: ddtree-ops deploy {report.host.partition('/')[0]}", 2)
            continue
        head.append(f"{(report.release or 'no release')[:12]}, {report.files} files hashed: ")
        counts = [sum(item.severity is severity for item in report.findings) for severity in Severity]
        if report.drift:
            words = [
                count(number, word)
                for number, word in zip(counts, ("error", "warning"), strict=False)
                if number
            ]
            head.append(f"drift, {' and '.join(words)}", "bold red" if counts[0] else "yellow")
        else:
            head.append("no drift", "green")
        say(console, head)
        for finding in report.findings:
            mark, style = _SEVERITY[finding.severity]
            say(console, Text.assemble((f"{mark} {finding.id}: ", style), finding.found), indent=2)
            indented(console, f"should be: {finding.should}", 4)
            for name in finding.names:
                indented(console, name, 6, "dim")
            if finding.count > len(finding.names):
                indented(console, f"... and {finding.count - len(finding.names)} more", 6, "dim")
            if finding.hint:
                indented(console, f"next: {finding.hint}", 4)


_HEAD = ("HOST", "UNIT", "SINCE", "RELEASE", "PATCH", "READY", "ACCEPT", "TOK/S")
_READY = {
    "validated": "green",
    "answering": "yellow",
    "running": "yellow",
    "loading": "yellow",
    "unconfirmed": "yellow",
    "failed": "bold red",
    "no answer": "bold red",
}
_CODE = {ExitCode.OK: "green", ExitCode.INCONCLUSIVE: "yellow"}


def ago(seconds: float) -> str:
    """``5s``, ``12m``, ``3h``, ``4d``: short, for a column."""
    for size, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{letter}"
    return f"{max(0, int(seconds))}s"


def print_status(console: Console, rows: Sequence[Status]) -> None:
    """One line a service in columns that fit 80, then what else is known of it, under itself."""
    codes = [_CODE.get(row.exit_code, "bold red") for row in rows]
    styles = [
        ["bold cyan", code, "", "", "", _READY.get(row.ready, ""), "", ""]
        for row, code in zip(rows, codes, strict=True)
    ]
    head, *lines = table_lines(_HEAD, [_cells(row) for row in rows], styles)
    say(console, head)
    for row, style, line in zip(rows, codes, lines, strict=True):
        say(console, line)
        if row.problem:
            indented(console, row.problem, 4, style)
        if row.next:
            indented(console, f"next: {row.next}", 4)
        for text in _details(row):
            indented(console, text, 4, "dim")


def _cells(row: Status) -> list[str]:
    seen = row.seen
    if seen is None:
        return [row.host, "unreachable" if row.exit_code is ExitCode.UNREACHABLE else "error", *["-"] * 6]
    state = seen.state
    word = "stopped" if seen.stopped else state.active_state if state.exists else "none"
    if state.auto_restarting or (state.running and state.n_restarts):
        word = f"{'restarting' if state.auto_restarting else word} ({state.n_restarts}x)"
    since = "-" if row.since is None or not state.exists else ago(seen.now - row.since.timestamp())
    figures = seen.figures
    return [
        row.host,
        word,
        since,
        (seen.release or "-")[:12],
        _patch_word(row.patch),
        row.ready,
        "-" if figures.accept_length is None else f"{figures.accept_length:.2f}",
        "-" if figures.tokens_per_s is None else f"{figures.tokens_per_s:.0f}",
    ]


def _patch_word(patch: Patch) -> str:
    return f"{patch.word}!" if patch.sized is False else patch.word


def _details(row: Status) -> list[str]:
    seen = row.seen
    if seen is None:
        return []
    latest, good = seen.history.latest, next(iter(seen.history.good()), None)
    parts = [f"model {seen.model}" if seen.model else "", row.patch.overlay]
    if row.patch.sized is False:
        parts.append("graphs of the WRONG size for this service")
    if seen.figures.age_s is not None:
        parts.append(f"figures {ago(seen.figures.age_s)} old")
    elif seen.state.running:
        parts.append(f"no figures: {seen.figures.note}")
    lines = ["; ".join(part for part in parts if part)]
    if latest is not None:
        verdict = latest.verdict or ("passed, not confirmed" if seen.unconfirmed else "not judged")
        text = f"last {latest.reason} {_when(latest, seen.now)} by {latest.who} on {latest.origin}: {verdict}"
        same = good is not None and good.id == latest.id
        known = (
            ""
            if same
            else f"; last good {good.release[:12]} {_when(good, seen.now)}"
            if good
            else "; none ever passed"
        )
        lines.append(text + known)
    if seen.armed:
        lines.append(f"rollback: {seen.armed}")
    if seen.lock:
        lines.append(f"lock: {seen.lock}")
    return [line for line in (*lines, *seen.disturbed) if line]


def _when(item: Activation, now: float) -> str:
    """How long ago, by two clocks that may differ a little."""
    moment = moment_of(item.time)
    return f"{ago(now - moment.timestamp())} ago" if moment else item.time
