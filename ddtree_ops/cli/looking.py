"""What runs against what should: ``status``, ``drift``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ddtree_ops.cli.common import (
    Duration,
    Hosts,
    InventoryOption,
    JsonOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    leave,
    on_hosts,
    open_session,
    out,
    parted,
    print_json,
    targets_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_ops.deploy.drift import DriftReport
    from ddtree_ops.deploy.status import Board, Status
    from ddtree_ops.inventory.models import Target
    from ddtree_ops.remote.session import Session

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("drift")(drift)


def status(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Look again every --interval, until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, Duration("--interval", help="Between two looks; half a second at least.")
    ] = 3.0,
    as_json: JsonOption = False,
) -> None:
    """How the services stand: unit, release, patch, answering or not, figures, last deploy, last known good.

    One cheap look, no completion: `smoke` proves that it works. Exit code: 0 all active and validated, 4 a host was
    not reached, 5 one is down or failed, 8 nothing deployed or not validated.
    """
    from ddtree_ops.deploy.status import Board
    from ddtree_ops.playbook.run import worst_code

    _, targets = targets_of(hosts, inventory=inventory, service=service, default_all=True)
    with Board(targets, open_session) as board:
        if watch:
            show_again(board, interval=max(interval, 0.5), as_json=as_json)
        rows = board.look()
    show_status(rows, as_json=as_json)
    leave([], worst_code(row.exit_code for row in rows))


def show_status(rows: Sequence[Status], *, as_json: bool) -> None:
    """Print one look."""
    if as_json:
        print_json({"schema": 1, "hosts": [row.to_json() for row in rows]})
        return
    from ddtree_ops.report.tables import print_status

    print_status(out, rows)


def show_again(board: Board, *, interval: float, as_json: bool) -> NoReturn:
    """Print look after look until somebody interrupts; on a terminal each in the place of the one before."""
    import time

    while True:
        rows = board.look()
        if out.is_terminal and not as_json:
            out.clear()
        show_status(rows, as_json=as_json)
        time.sleep(interval)


def drift(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what runs with what should: files, unit, process, venv. Everything is looked at, nothing changed.

    Exit code: 0 no drift, 5 drift, 8 nothing was ever deployed.
    """
    from ddtree_ops.deploy.drift import find_drift, worst_exit
    from ddtree_ops.deploy.known import KnownBundles
    from ddtree_ops.report.tables import print_drift

    _, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings, default_all=True
    )

    known = KnownBundles()

    def one(session: Session, target: Target) -> DriftReport:
        return find_drift(target, session, known=known)

    failed, done = parted(targets, on_hosts(targets, one))
    reports = [report for _, report in done]
    if as_json:
        print_json(
            {
                "schema": 1,
                "hosts": [report.to_json() for report in reports],
                "errors": [error.render() for error in failed],
            }
        )
    else:
        print_drift(out, reports)
    leave(failed, worst_exit(reports))
