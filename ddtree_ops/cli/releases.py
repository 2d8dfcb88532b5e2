"""Commands for what lies on hosts: ``releases``, ``history``, ``audit``, ``rollback``, ``prune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    ServiceOption,
    leave,
    on_hosts,
    out,
    parted,
    play,
    print_json,
    rolling,
    safety_of,
    same_again,
    targets_of,
)
from ddtree_ops.errors import ExitCode, OpsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddtree_ops.deploy.audit import HostAudit
    from ddtree_ops.deploy.history import History
    from ddtree_ops.deploy.releases import HostReleases, Pruned
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session

__all__ = ["register"]

_T = TypeVar("_T")
LinesOption = Annotated[int, typer.Option("--lines", "-n", min=1, help="The newest N.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("releases")(releases)
    app.command("history")(history)
    app.command("audit")(audit)
    app.command("rollback")(rolling(rollback))
    app.command("prune")(prune)


def releases(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Have the hosts hash every file: whole or damaged.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """What is published on hosts: size, who uses it, its last verdict. Exit code 5: --verify found a damaged one."""
    from ddtree_ops.deploy import releases as published
    from ddtree_ops.report.lists import print_releases
    from ddtree_ops.runtime.bundle import known_origins

    targets = _one_a_host(hosts, inventory)
    origins = known_origins()

    def one(session: Session, target: Target) -> HostReleases:
        root = target.host.deploy_root.rstrip("/")
        found = published.releases_of(published.look(session, root), origins=origins)
        return published.verify(session, root, found) if verify else found

    failed, done = parted(targets, on_hosts(targets, one))
    if as_json:
        _print(done, failed, lambda host, found: {"host": host, **found.to_json()})
    else:
        for host, found in done:
            print_releases(out, host, found)
    damaged = any(release.problems for _, found in done for release in found.releases)
    leave(failed, ExitCode.CHECK_FAILED if damaged else ExitCode.OK if done else None)


def history(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    lines: LinesOption = 20,
    as_json: JsonOption = False,
) -> None:
    """Activations of services with their verdicts and what each changed against the one before, newest last."""
    from ddtree_ops.deploy.changed import kept_texts, one_by_one
    from ddtree_ops.deploy.history import read_history
    from ddtree_ops.report.lists import print_history
    from ddtree_ops.service.layout import Layout

    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)

    def one(session: Session, target: Target) -> tuple[str, History, Mapping[str, Sequence[str]]]:
        layout = Layout.of(target)
        found = read_history(session, layout)
        shown = found.activations[-lines - 1 :]
        texts = kept_texts(session, layout, (item.unit_sha256 for item in shown))
        return target.service.unit, found, one_by_one(found.activations, texts, lines=lines)

    failed, done = parted(targets, on_hosts(targets, one))
    if as_json:
        _print(
            done,
            failed,
            lambda host, found: {"host": host, "unit": found[0], **found[1].to_json(lines, found[2])},
        )
    else:
        for host, (unit, found, changes) in done:
            print_history(out, host, unit, found, changes, lines=lines)
    leave(failed, ExitCode.OK if done else None)


def audit(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    lines: LinesOption = 40,
    as_json: JsonOption = False,
) -> None:
    """Everything that was done on hosts, all services: activations and acts in the order of time, newest last."""
    from ddtree_ops.deploy.audit import read_audit
    from ddtree_ops.report.lists import print_audit

    targets = _one_a_host(hosts, inventory)

    def one(session: Session, target: Target) -> HostAudit:
        return read_audit(session, target.host.deploy_root.rstrip("/"))

    failed, done = parted(targets, on_hosts(targets, one))
    if as_json:
        _print(done, failed, lambda host, found: {"host": host, **found.to_json(lines)})
    else:
        for host, found in done:
            print_audit(out, host, found, lines=lines)
    leave(failed, ExitCode.OK if done else None)


def rollback(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="RELEASE|ACTIVATION|TIME", help="Beginning of one, or ISO 8601 (UTC)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it would go to and change; change nothing.")
    ] = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to the newest activation that passed and is another than what is there now, or to the one named.

    Only what stands in the host's history and is whole on its disk. It is waited for and smoke-tested as a deploy is;
    where it fails, what ran before comes back (exit code 7).
    """
    from ddtree_ops.playbook import operate

    _, targets = targets_of(hosts, inventory=inventory, service=service)
    playbook = operate.go_back(to=to)
    if dry_run:
        _show_way_back(targets, to, as_json=as_json)
        return
    again = same_again("rollback", service=service, to=to)
    safety = safety_of("rollback", lock_wait=lock_wait, again=again)
    play(playbook, targets, as_json=as_json, safety=safety)


def _show_way_back(targets: Sequence[Target], to: str | None, *, as_json: bool) -> None:
    from ddtree_ops.deploy.goback import Back, preview
    from ddtree_ops.report.lists import print_way_back

    def one(session: Session, target: Target) -> Back:
        return preview(target, session, to)

    failed, done = parted(targets, on_hosts(targets, one))
    if as_json:
        plans, errors = [back.to_json() for _, back in done], [error.render() for error in failed]
        print_json({"schema": 1, "plans": plans, "errors": errors})
    else:
        for host, back in done:
            print_way_back(out, host, back)
    leave(failed, ExitCode.OK if done else None)


def prune(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Releases that passed to keep for each service.")
    ] = 3,
    evidence_days: Annotated[
        float,
        typer.Option(
            "--evidence-days", min=0, help="Remove evidence, there and on this machine, older than that."
        ),
    ] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove releases, unit files, leftovers of pushes and byte code that nothing needs, and old evidence.

    Never what a service runs, what it last passed with, what an armed rollback goes to, or a push under way.
    """
    from ddtree_ops.deploy import releases as published
    from ddtree_ops.report.lists import print_pruned
    from ddtree_ops.service.layout import Layout

    targets = _one_a_host(hosts, inventory, default_all=False)

    def one(session: Session, target: Target) -> Pruned:
        return published.prune(
            session, Layout.of(target), keep=keep, dry_run=dry_run, evidence_days=evidence_days
        )

    failed, done = parted(targets, on_hosts(targets, one))
    old = published.prune_evidence(days=evidence_days, dry_run=dry_run)
    if as_json:
        _print(
            done,
            failed,
            lambda host, found: {"host": host, **found.to_json()},
            evidence=[str(path) for path in old],
        )
    else:
        for host, found in done:
            print_pruned(out, host, found)
        if old:
            verb = "would remove" if dry_run else "removed"
            out.write_line(f"here: {verb} {len(old)} evidence folders older than {evidence_days:g} days")
    leave(failed, ExitCode.OK if done else None)


def _one_a_host(hosts: list[str] | None, inventory: str | None, *, default_all: bool = True) -> list[Target]:
    """One target of each selected host."""
    _, targets = targets_of(hosts, inventory=inventory, default_all=default_all)
    return list({target.host.name: target for target in targets}.values())


def _print(
    done: Sequence[tuple[str, _T]],
    failed: Sequence[OpsError],
    form: Callable[[str, _T], dict[str, Any]],
    **more: Any,
) -> None:
    print_json(
        {
            "schema": 1,
            "hosts": [form(host, found) for host, found in done],
            "errors": [error.render() for error in failed],
            **more,
        }
    )
