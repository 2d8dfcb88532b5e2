"""The ``router`` commands: the upstream sglang-router in front of the hosts of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_ops.cli.common import (
    InventoryOption,
    JsonOption,
    LockWaitOption,
    err,
    leave,
    open_session,
    out,
    print_json,
)
from ddtree_ops.errors import ExitCode, OpsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from ddtree_ops.deploy.router import RouterDeployment
    from ddtree_ops.inventory.models import Inventory, Router, Target
    from ddtree_ops.results import Reporter

    _T = TypeVar("_T")

__all__ = ["register"]

router_app = typer.Typer(no_args_is_help=True, help="The sglang-router in front of several hosts.")

Name = Annotated[str | None, typer.Argument(help="Router of the inventory; left out: the only one.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(router_app, name="router")


def _load(inventory: str | None) -> Inventory:
    from ddtree_ops.inventory import load_inventory
    from ddtree_ops.report.typed import remember_inventory

    if inventory is not None:
        remember_inventory(inventory)
    return load_inventory(inventory)


def _target(loaded: Inventory, router: Router) -> Target:
    """Stands for the router's host where a session is opened."""
    from ddtree_ops.inventory.routers import workers

    return workers(loaded, router)[0].target.model_copy(update={"host": loaded.hosts[router.host]})


def _with(
    loaded: Inventory, router: Router, report: Reporter, action: Callable[[RouterDeployment], _T]
) -> _T:
    from ddtree_ops.deploy.router import RouterDeployment

    with open_session(_target(loaded, router)) as session:
        return action(RouterDeployment(loaded, router, session, report))


@router_app.command("deploy")
def deploy(
    name: Name = None,
    inventory: InventoryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, change nothing.")] = False,
    lock_wait: LockWaitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a router to what the inventory says, wait for all workers, ask through it, go back on failure.

    Exit code 0 (also where nothing changes), 3 a worker was not healthy in time, 5 a check failed, 6 lock held,
    7 failed and the former unit file is back.
    """
    from ddtree_ops.inventory.routers import find_router
    from ddtree_ops.report.progress import progress_for
    from ddtree_ops.report.routers import print_router_result

    wait = lock_wait or 0.0
    loaded = _load(inventory)
    router = find_router(loaded, name)
    with progress_for(err if as_json else out) as report:
        result = _with(loaded, router, report, lambda one: one.deploy(dry_run=dry_run, lock_wait=wait))
    if as_json:
        print_json(result.to_json())
    else:
        print_router_result(out, result)
    raise typer.Exit(int(result.exit_code))


@router_app.command("status")
def status(name: Name = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """How routers and their workers stand. Exit code 5: one does not run, or misses a worker."""
    from ddtree_ops.inventory.routers import find_router
    from ddtree_ops.report.routers import print_router_view

    loaded = _load(inventory)
    routers = (
        [find_router(loaded, name)] if name is not None or not loaded.routers else [*loaded.routers.values()]
    )
    views, failed = [], []
    for router in routers:
        try:
            views.append(_with(loaded, router, lambda event: None, lambda one: one.view()))
        except OpsError as error:
            failed.append(error.at(host=router.host))
    if as_json:
        print_json({"schema": 1, "routers": [view.to_json() for view in views]})
    else:
        for view in views:
            print_router_view(out, view)
    healthy = all(view.healthy for view in views)
    leave(failed, (ExitCode.OK if healthy else ExitCode.CHECK_FAILED) if views else None)


@router_app.command("start")
def start(name: Name = None, inventory: InventoryOption = None) -> None:
    """Start a router as it is."""
    _operate(name, inventory, "start")


@router_app.command("stop")
def stop(name: Name = None, inventory: InventoryOption = None) -> None:
    """Stop a router: clients get no answer from then on; the workers keep running."""
    _operate(name, inventory, "stop")


def _operate(name: str | None, inventory: str | None, action: str) -> None:
    from ddtree_ops.inventory.routers import find_router

    loaded = _load(inventory)
    router = find_router(loaded, name)
    text = _with(loaded, router, lambda event: None, lambda one: one.operate(action))
    out.print(f"{router.name} on {router.host}: {text}", markup=False, soft_wrap=True)


@router_app.command("logs")
def logs(
    name: Name = None,
    inventory: InventoryOption = None,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", metavar="RE", help="Python regular expression.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="The newest N entries.")] = 50,
    invocation: Annotated[
        str, typer.Option("--invocation", help="current, previous, all, or an invocation id.")
    ] = "current",
) -> None:
    """The router's journal without its colours. Exit code 5: nothing matched, 8: nothing to search."""
    from ddtree_ops.deploy.router import plain
    from ddtree_ops.inventory.routers import find_router

    loaded = _load(inventory)
    router = find_router(loaded, name)
    found = _with(
        loaded, router, lambda event: None, lambda one: one.control.search(grep, invocation=invocation)
    )
    for entry in found.matches[-lines:]:
        out.print(f"{entry.time:%m-%d %H:%M:%S} {plain(entry.message)}", markup=False, soft_wrap=True)
    err.print(f"{router.host}: {found.describe()}", style="dim", markup=False, soft_wrap=True)
    if grep and not found.matches:
        raise typer.Exit(int(ExitCode.CHECK_FAILED))
