"""What lies on hosts and what happened there, as lines: releases, history, audit, prune."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ddtree_ops.deploy.history import BENCH
from ddtree_ops.report.summary import indented, print_plan, say
from ddtree_ops.results import Verdict
from ddtree_ops.wording import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddtree_ops.deploy.audit import HostAudit
    from ddtree_ops.deploy.goback import Back
    from ddtree_ops.deploy.history import Activation, History
    from ddtree_ops.deploy.releases import HostReleases, Pruned, Release

__all__ = ["print_audit", "print_history", "print_pruned", "print_releases", "print_way_back"]

_VERDICT = {
    Verdict.PASS: ("passed", "green"),
    Verdict.FAIL: ("failed", "bold red"),
    Verdict.INCONCLUSIVE: ("inconclusive", "yellow"),
    Verdict.SKIPPED: ("skipped", "dim"),
    None: ("not judged", "yellow"),
}


def print_releases(console: Console, host: str, found: HostReleases) -> None:
    """Two lines a release: what it is, and who uses it."""
    say(
        console,
        Text.assemble(
            (f"{host} ", "bold cyan"),
            f"{count(len(found.releases), 'release')}, {found.free_bytes / 2**30:.1f} GiB free",
        ),
    )
    for release in found.releases:
        word, style = _VERDICT[release.verdict] if release.activations else ("never activated", "dim")
        line = Text.assemble(
            ("● " if release.current_of else "  ", "green"),
            (release.digest[:12], "bold"),
            f" {release.published:%Y-%m-%d %H:%M}Z  {_size(release.bytes):>8}, {_size(release.own_bytes):>8} of its own  ",
            (word, style),
            f"  {release.runtime or 'runtime not recorded'}",
        )
        say(console, line)
        for text in _about(release):
            indented(console, text, 15, "dim")
        if release.problems is not None:
            whole = f"whole: {release.files} files verified" if not release.problems else "damaged: "
            indented(
                console,
                whole + "; ".join(release.problems[:4]),
                15,
                "bold red" if release.problems else "green",
            )
    for item in found.leftovers:
        what = "a push under way" if item.live else "a push that broke off: the next push goes on with it"
        indented(console, f"{_size(item.bytes)} of {what}", 2, "dim")
    _damaged(console, found.damaged_lines, "the histories")


def _about(release: Release) -> list[str]:
    found = [f"current of {unit}" for unit in release.current_of]
    found += [f"last known good of {unit}" for unit in release.good_of]
    found += [f"an armed rollback of {unit} goes to it" for unit in release.armed_of]
    if release.base is not None:
        parts = [*(release.patches or ()), *filter(None, [release.overlay])]
        found.append(" + ".join([release.base, *parts]) + ("" if release.patches else ", no patches"))
    return found


def print_history(
    console: Console,
    host: str,
    unit: str,
    history: History,
    changes: Mapping[str, Sequence[str]],
    *,
    lines: int,
) -> None:
    """An activation, newest last; under it what it changed, and who did it.

    :param changes: by id of the activation.
    """
    shown = history.activations[-lines:]
    say(
        console,
        Text.assemble(
            (f"{host} ", "bold cyan"), f"{unit}: {len(shown)} of {len(history.activations)} activations"
        ),
    )
    for item in shown:
        word, style = _VERDICT[item.verdict]
        line = Text.assemble(
            f"{_time(item.time)}  ",
            (f"{_act(item):<9}", "dim" if item.command == BENCH else "bold"),
            f" {item.release[:12]} {item.runtime}".rstrip() + "  ",
            (word, style),
        )
        say(console, line, indent=2)
        indented(console, "; ".join(changes.get(item.id, ())) or "nothing changed: the same once more", 4)
        indented(console, f"{item.who}@{item.origin}  {item.id}", 4, "dim")
        if item.summary and item.verdict is not Verdict.PASS:
            indented(console, item.summary, 4, "dim")
    _damaged(console, history.damaged, "the history")


def _act(activation: Activation) -> str:
    """What was done; a deploy that a bench made to measure is no deploy of anybody's."""
    return BENCH if (activation.command, activation.reason) == (BENCH, "deploy") else activation.reason


def print_way_back(console: Console, host: str, back: Back) -> None:
    """What a rollback would go to, and the plan of it."""
    say(console, Text.assemble((f"{host} ", "bold cyan"), "would go back to ", back.describe()))
    print_plan(console, back.plan)


def print_audit(console: Console, host: str, audit: HostAudit, *, lines: int) -> None:
    """One act or activation a line, newest last."""
    shown = audit.entries[-lines:]
    say(console, Text.assemble((f"{host} ", "bold cyan"), f"{len(shown)} of {len(audit.entries)} entries"))
    for entry in shown:
        style = (
            "green"
            if entry.outcome in {"pass", "ok"}
            else "bold red"
            if entry.outcome in {"fail", "failed"}
            else ""
        )
        line = Text.assemble(
            f"{_time(entry.time)}  ",
            (f"{entry.action:<19}", "bold"),
            f" {entry.service or 'host'}  ",
            (entry.outcome or "not judged", style),
            (f"  {entry.who}@{entry.origin}", "dim"),
        )
        say(console, line, indent=2)
        if entry.detail:
            indented(console, entry.detail, 4, "dim")
    for path, lines_lost in audit.damaged.items():
        _damaged(console, lines_lost, path)


def print_pruned(console: Console, host: str, pruned: Pruned) -> None:
    """What went, what stayed and why."""
    say(console, Text.assemble((f"{host} ", "bold cyan"), pruned.describe()))
    for digest in pruned.plan.remove if pruned.dry_run else pruned.removed:
        say(console, Text.assemble(("- ", "red"), digest[:12]), indent=2)
    for digest, unit in pruned.refused:
        say(
            console,
            Text.assemble(("= ", "yellow"), f"{digest[:12]} came into use meanwhile: {unit}"),
            indent=2,
        )
    for digest, reasons in pruned.plan.stays.items():
        say(console, Text.assemble(("= ", "dim"), f"{digest[:12]} ", ("; ".join(reasons), "dim")), indent=2)
    if pruned.note:
        indented(console, pruned.note, 2, "yellow")


def _damaged(console: Console, lines: int, where: str) -> None:
    if lines:
        text = f"{count(lines, 'line')} of {where} cannot be read: what they said is not known here"
        indented(console, text, 2, "yellow")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _time(text: str) -> str:
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}Z"
    except ValueError:
        return text
