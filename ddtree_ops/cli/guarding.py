"""Commands around what guards a deployment: ``confirm``, ``lock status``, ``lock break``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    LockWaitOption,
    ServiceOption,
    err,
    leave,
    on_all,
    open_session,
    out,
    parted,
    print_json,
    targets_of,
)
from ddtree_ops.errors import ExitCode, OpsError, UsageError

if TYPE_CHECKING:
    from ddtree_ops.deploy.confirming import Confirmation, Lock
    from ddtree_ops.inventory.models import Target

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("confirm")(confirm)
    lock = typer.Typer(no_args_is_help=True, help="The leased locks of services: who deploys.")
    lock.command("status")(status)
    lock.command("break")(break_)
    app.add_typer(lock, name="lock")


def confirm(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Confirm without a look at the service: you vouch for it.")
    ] = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Confirm a deployment that is armed, so that its host does not go back by itself.

    After deploy --confirm-within, or where the client of a deploy died: then it is validated first.
    """
    _, targets = targets_of(hosts, inventory=inventory, service=service)
    from ddtree_ops.deploy import confirming
    from ddtree_ops.report.progress import progress_for

    with progress_for(err if as_json else out) as report:

        def one(target: Target) -> Confirmation:
            with open_session(target) as session:
                return confirming.confirm(
                    target,
                    session,
                    report,
                    reconnect=lambda: open_session(target),
                    force=force,
                    lock_wait=lock_wait or 0.0,
                )

        failed, done = parted(targets, on_all(targets, one))
    if as_json:
        print_json({"schema": 1, "confirmations": [item.to_json() for _, item in done]})
    else:
        for _, item in done:
            out.print(f"{item.host}: {item.message}", markup=False, soft_wrap=True)
    leave(failed, ExitCode.OK if done else None)


def _locks(targets: list[Target]) -> tuple[list[OpsError], list[tuple[str, Lock]]]:
    from ddtree_ops.deploy.confirming import look_at_lock

    def one(target: Target) -> Lock:
        with open_session(target) as session:
            return look_at_lock(target, session)

    return parted(targets, on_all(targets, one))


def status(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who holds the locks, since when, for what; and which rollbacks are armed."""
    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)
    failed, locks = _locks(targets)
    if as_json:
        errors = [error.render() for error in failed]
        print_json({"schema": 1, "locks": [lock.to_json() for _, lock in locks], "errors": errors})
    else:
        for _, lock in locks:
            out.print(f"{lock.host}: {lock.describe()}", markup=False, soft_wrap=True)
    leave(failed, ExitCode.OK if locks else None)


def break_(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take locks away from their holders. A deploy that loses its lock so stops before its next change.

    What it had armed stays armed: its host goes back by itself, unless another deploy takes over.
    """
    if not yes and not sys.stdin.isatty():
        look, take = (" ".join(["ddtree-ops lock", word, *(hosts or ())]) for word in ("status", "break"))
        raise UsageError(
            "breaking a lock needs --yes where nobody can be asked",
            state="nothing was broken",
            hint=f"see who holds it: {look}; then: {take} --yes",
        )
    _, targets = targets_of(hosts, inventory=inventory, service=service)
    from ddtree_ops.deploy.confirming import break_lock

    def one(target: Target) -> str:
        with open_session(target) as session:
            return break_lock(target, session, found[target.name])

    unseen, looked = _locks(targets)
    found = dict(looked)
    for name, lock in found.items():
        if lock.held and not yes:
            err.print(f"{name}: {lock.describe()}", markup=False, soft_wrap=True)
    if not yes and any(lock.held for lock in found.values()):
        typer.confirm("Break it?" if len(found) == 1 else "Break them?", abort=True, err=True)
    seen = [target for target in targets if target.name in found]
    failed, done = parted(seen, on_all(seen, one))
    if as_json:
        rows = [{"host": name, "held": found[name].held, "message": message} for name, message in done]
        print_json({"schema": 1, "broken": rows})
    else:
        for name, message in done:
            out.print(f"{name}: {message}", markup=False, soft_wrap=True)
    leave([*unseen, *failed], ExitCode.OK if done else None)
