"""``lint``: what can be known before anything is touched."""

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
    err,
    out,
    print_json,
    targets_of,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lint")(lint)


def lint(
    hosts: Hosts = None,
    inventory: InventoryOption = None,
    service: ServiceOption = None,
    runtime: RuntimeOption = None,
    settings: SetOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Leave with 5 where there is a warning.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules, and look at nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check launch flags and settings against the runtime's own flags and what is known not to work.

    No host is contacted. Without hosts: all of them. Exit code 78 with an error, 0 without; a warning is shown, and is 5
    with --strict.
    """
    if rules:
        from ddtree_ops.lint import rules_table

        out.write_line(rules_table().rstrip())
        return
    loaded, targets = targets_of(
        hosts, inventory=inventory, service=service, runtime=runtime, settings=settings, default_all=True
    )
    from ddtree_ops.lint.survey import survey

    found = survey(targets, loaded.path, settings=settings or (), runtime=runtime, progress=err.write_line)
    if as_json:
        print_json(found.to_json())
    else:
        from ddtree_ops.report.findings import print_findings

        print_findings(out, found)
    raise typer.Exit(int(found.exit_code(strict=strict)))
