"""Commands that change hosts: ``deploy``, ``run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    leave,
    on_all,
    open_session,
    out,
    play,
    print_json,
    targets_of,
)
from ddtree_ops.errors import ExitCode, OpsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.deploy.plan import Plan
    from ddtree_ops.inventory.models import Target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("deploy")(deploy)
    app.command("run")(run)


def deploy(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring hosts to what the inventory says, wait, smoke-test, roll back on failure.

    Runs playbooks/deploy.yaml: preflight, build, push, verify, activate, wait, smoke, signatures.
    A second deploy of the same thing changes nothing and says so.
    """
    _, targets = targets_of(hosts, inventory=inventory, service=service, runtime=runtime, settings=settings)
    if dry_run:
        show_plans(targets, as_json=as_json)
    else:
        play("deploy", targets, as_json=as_json)


def show_plans(targets: Sequence[Target], *, as_json: bool) -> None:
    """Print what a deploy would change."""
    from ddtree_ops.deploy.deployment import Deployment
    from ddtree_ops.report.summary import print_plan

    def one(target: Target) -> Plan | None:
        with open_session(target) as session:
            deployment = Deployment(target, session, lambda event: None)
            deployment.build()
            return deployment.plan

    outcomes = on_all(targets, one)
    failed = [outcome for outcome in outcomes if isinstance(outcome, OpsError)]
    plans = [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, OpsError)]
    if as_json:
        print_json([plan.to_json() for plan in plans])
    else:
        for plan in plans:
            print_plan(out, plan)
    leave(failed, ExitCode.OK if plans else None)


def run(
    playbook: Annotated[str, typer.Argument(help="Name or path of a playbook, e.g. deploy or check.")],
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run any playbook over hosts."""
    _, targets = targets_of(hosts, inventory=inventory, service=service, runtime=runtime, settings=settings)
    play(playbook, targets, as_json=as_json)
