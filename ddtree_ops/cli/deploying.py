"""Commands that change hosts: ``deploy``, ``run``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ddtree_ops.cli.common import (
    ConfirmWithinOption,
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    NoRollbackOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    play,
    rolling,
    safety_of,
    same_again,
    targets_of,
)
from ddtree_ops.cli.planning import DetailedOption, FilesOption, show_plans

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("deploy")(rolling(deploy))
    app.command("run")(rolling(run))


def deploy(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    files: FilesOption = False,
    detailed_exitcode: DetailedOption = False,
    no_rollback: NoRollbackOption = False,
    confirm_within: ConfirmWithinOption = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring hosts to what the inventory says, wait, smoke-test, roll back on failure.

    Runs playbooks/deploy.yaml: lint, preflight, build, push, verify, activate, wait, smoke, signatures.
    A second deploy of the same thing changes nothing and says so. Should this client die on the way, the host goes
    back by itself.
    """
    again = same_again("deploy", service=service, runtime=runtime, set=settings, no_rollback=no_rollback)
    safety = safety_of(
        "deploy",
        no_rollback=no_rollback,
        confirm_within=confirm_within,
        lock_wait=lock_wait,
        again=again,
        lint=same_again("lint", service=service, runtime=runtime, set=settings),
    )
    _, targets = targets_of(hosts, inventory=inventory, service=service, runtime=runtime, settings=settings)
    if dry_run:
        show_plans(targets, as_json=as_json, files=files, detailed=detailed_exitcode)
    else:
        play("deploy", targets, as_json=as_json, safety=safety)


def run(
    playbook: Annotated[str, typer.Argument(help="Name or path of a playbook, e.g. deploy or check.")],
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run any playbook over hosts."""
    again = same_again(f"run {shlex.quote(playbook)}", service=service, runtime=runtime, set=settings)
    linting = same_again("lint", service=service, runtime=runtime, set=settings)
    safety = safety_of(f"run {playbook}", lock_wait=lock_wait, again=again, lint=linting)
    known, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings
    )
    from ddtree_ops.playbook.load import load_playbook

    loaded = load_playbook(playbook)
    if loaded.reports:
        from ddtree_ops.cli.nightly import perform

        perform(loaded, targets, inventory=known, safety=safety, as_json=as_json)
    play(loaded, targets, as_json=as_json, safety=safety)
