"""What a deploy would change, shown, kept and applied: ``plan``, ``apply``."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    err,
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
from ddtree_ops.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.deploy.saved import Planned
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session

__all__ = ["DetailedOption", "FilesOption", "register", "show_plans"]

FilesOption = Annotated[bool, typer.Option("--files", help="Name the runtime files that differ.")]
DetailedOption = Annotated[
    bool, typer.Option("--detailed-exitcode", help="0: no change, 2: changes; errors keep their codes.")
]
_CHANGES = 2


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("plan")(plan)
    app.command("apply")(rolling(apply))


def plan(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep the plan for `apply FILE`.", dir_okay=False),
    ] = None,
    files: FilesOption = False,
    detailed_exitcode: DetailedOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a deploy would change: files, unit, arguments, variables, restart or not and why. Changes nothing.

    Takes no lock, so it works while somebody deploys. `--out FILE` keeps the plan, `apply FILE` does just that.
    """
    from ddtree_ops.deploy.saved import check_settings

    if out_file is not None:
        check_settings(settings or ())
    loaded, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings
    )
    planned = show_plans(
        targets, as_json=as_json, files=files, detailed=detailed_exitcode, stay=out_file is not None
    )
    if out_file is not None:
        from ddtree_ops.deploy.saved import save_plans

        save_plans(out_file, planned, inventory=loaded, runtime=runtime, settings=settings or ())
        err.print(f"kept in {out_file}; next: ddtree-ops apply {out_file}", markup=False, soft_wrap=True)
        _leave(planned, detailed=detailed_exitcode)


def apply(
    file: Annotated[Path, typer.Argument(help="A plan that `plan --out FILE` wrote.", dir_okay=False)],
    no_rollback: NoRollbackOption = False,
    confirm_within: ConfirmWithinOption = None,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy exactly what a saved plan says, to its hosts; refuse where a host or the inventory changed since.

    What differs is said line by line, exit code 1, and nothing is changed.
    """
    from ddtree_ops.deploy.saved import read_plan

    safety = safety_of(
        "apply",
        no_rollback=no_rollback,
        confirm_within=confirm_within,
        lock_wait=lock_wait,
        again=f"ddtree-ops apply {shlex.quote(str(file))}",
    )
    saved = read_plan(file)
    safety = replace(
        safety,
        lint=same_again("lint", inventory=saved.inventory, runtime=saved.runtime, set=list(saved.settings)),
    )
    _, targets = targets_of(
        saved.hosts, inventory=saved.inventory, runtime=saved.runtime, settings=saved.settings
    )
    targets, expected = saved.match(targets)
    play("deploy", targets, as_json=as_json, expected=expected, safety=safety)


def show_plans(
    targets: Sequence[Target], *, as_json: bool, files: bool, detailed: bool, stay: bool = False
) -> list[Planned]:
    """Print what a deploy would change and leave with its exit code.

    :param stay: leave only where a host gave no plan; else return the plans.
    """
    from ddtree_ops.deploy.known import KnownBundles
    from ddtree_ops.deploy.saved import look_and_plan
    from ddtree_ops.report.summary import print_plan

    known = KnownBundles()

    def one(session: Session, target: Target) -> Planned:
        return look_and_plan(target, session, known=known)

    failed, done = parted(targets, on_hosts(targets, one))
    planned = [item for _, item in done]
    if as_json:
        plans, errors = [item.plan.to_json() for item in planned], [error.render() for error in failed]
        print_json({"schema": 1, "plans": plans, "errors": errors})
    else:
        for item in planned:
            print_plan(out, item.plan, files=files)
    if failed:
        leave(failed, ExitCode.OK if planned else None)
    if not stay:
        _leave(planned, detailed=detailed)
    return planned


def _leave(planned: Sequence[Planned], *, detailed: bool) -> None:
    changes = any(not item.plan.empty for item in planned)
    raise typer.Exit(_CHANGES if detailed and changes else int(ExitCode.OK))
