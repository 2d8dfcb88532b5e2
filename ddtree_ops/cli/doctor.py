"""``doctor``: are these hosts fit for what the inventory says? Looks, changes nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.common import (
    Hosts,
    InventoryOption,
    JsonOption,
    RuntimeOption,
    ServiceOption,
    SetOption,
    open_session,
    out,
    print_json,
    targets_of,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show the checks that passed too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Everything that can be known of hosts before a deploy, in one request each; nothing is changed.

    Exit code: 0 all passed, 5 a check failed, 4 only because hosts cannot be reached, 8 warnings.
    """
    from ddtree_ops.deploy.doctor import diagnose_hosts, exit_code, wanted_of
    from ddtree_ops.remote.lean import import_fabric

    _, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings, default_all=True
    )
    import_fabric()
    found = diagnose_hosts(targets, open_session, wanted_of)
    code = exit_code(found)
    if as_json:
        print_json({"schema": 1, "exit_code": int(code), "hosts": [one.to_json() for one in found]})
    else:
        from ddtree_ops.report.doctor import print_doctor

        print_doctor(out, found, everything=everything)
    raise typer.Exit(int(code))
