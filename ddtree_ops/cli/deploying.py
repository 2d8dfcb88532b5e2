"""Commands that change hosts: ``deploy``, ``run``."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    duration_of,
    play,
    rolling,
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
    no_rollback: Annotated[
        bool,
        typer.Option(
            "--no-rollback", help="Leave what failed as it is, for inspection; the host arms nothing."
        ),
    ] = False,
    confirm_within: Annotated[
        str | None,
        typer.Option(
            "--confirm-within",
            metavar="DURATION",
            help="What passed must be confirmed by ddtree-ops confirm within this time, else the host goes back.",
        ),
    ] = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring hosts to what the inventory says, wait, smoke-test, roll back on failure.

    Runs playbooks/deploy.yaml: lint, preflight, build, push, verify, activate, wait, smoke, signatures.
    A second deploy of the same thing changes nothing and says so. Should this client die on the way, the host goes
    back by itself.
    """
    from ddtree_ops.deploy.guard import Safety

    safety = Safety.of(
        command="deploy",
        rollback=not no_rollback,
        confirm_within=duration_of(confirm_within, "--confirm-within"),
        lock_wait=duration_of(lock_wait, "--lock-wait"),
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
    from ddtree_ops.deploy.guard import Safety

    safety = Safety.of(command=f"run {playbook}", lock_wait=duration_of(lock_wait, "--lock-wait"))
    _, targets = targets_of(hosts, inventory=inventory, service=service, runtime=runtime, settings=settings)
    play(playbook, targets, as_json=as_json, safety=safety)
