"""What the commands share: options, consoles, selection, the way results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ddtree_ops.deploy.deployment import Result
    from ddtree_ops.inventory.models import Inventory, Target
    from ddtree_ops.remote.session import Session
    from ddtree_ops.results import Reporter

__all__ = [
    "Hosts",
    "InventoryOption",
    "JsonOption",
    "RuntimeOption",
    "ServiceOption",
    "SetOption",
    "err",
    "open_session",
    "out",
    "play",
    "print_json",
    "targets_of",
]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Hosts = Annotated[list[str] | None, typer.Argument(help="Host names, groups or globs.", show_default=False)]
InventoryOption = Annotated[
    str | None,
    typer.Option(
        "--inventory",
        "-i",
        metavar="NAME|PATH",
        help="Inventory; default $DDTREE_OPS_INVENTORY or production.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
ServiceOption = Annotated[str | None, typer.Option("--service", "-s", help="Only this service of the hosts.")]
RuntimeOption = Annotated[str | None, typer.Option("--runtime", help="Another runtime of the inventory.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, e.g. speculative.budget=16 or args.mem-fraction-static=0.85.",
    ),
]


def targets_of(
    hosts: Sequence[str] | None,
    *,
    inventory: str | None,
    service: str | None = None,
    runtime: str | None = None,
    settings: Sequence[str] | None = None,
    default_all: bool = False,
) -> tuple[Inventory, list[Target]]:
    """The inventory and the selected targets with ``--runtime`` and ``--set`` applied."""
    from ddtree_ops.inventory import load_inventory, override, select

    loaded = load_inventory(inventory)
    targets = select(loaded, list(hosts or ()), service=service, default_all=default_all)
    wanted = [*(settings or ()), *([f"runtime={runtime}"] if runtime is not None else ())]
    return loaded, [override(target, wanted, inventory=loaded) for target in targets]


def open_session(target: Target) -> Session:
    """A session to the target's host."""
    from ddtree_ops.inventory import connect_spec
    from ddtree_ops.remote import connect

    return connect(connect_spec(target.host))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def play(
    playbook_name: str,
    targets: Sequence[Target],
    *,
    as_json: bool,
    overrides: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Run a playbook over targets, print the outcome, exit with its code.

    :param overrides: step kind -> arguments given on the command line.
    """
    from ddtree_ops.remote.ahead import Ahead

    first = {target.host.name: target for target in targets}
    with Ahead((name, partial(open_session, target)) for name, target in first.items()) as sessions:
        from ddtree_ops.playbook.load import load_playbook
        from ddtree_ops.playbook.run import exit_code, run_playbook
        from ddtree_ops.report.progress import progress_for
        from ddtree_ops.report.summary import print_results

        playbook = load_playbook(playbook_name)
        if overrides:
            playbook = playbook.with_arguments(overrides)
        with progress_for(err if as_json else out) as report:
            results = run_playbook(
                playbook, targets, connect=lambda target: sessions.take(target.host.name), report=report
            )
    finish(results, as_json=as_json, printer=print_results, code=int(exit_code(results)))


def finish(results: list[Result], *, as_json: bool, printer: Any, code: int) -> None:
    """Print results one way or the other and leave."""
    if as_json:
        print_json([result.to_json() for result in results])
    else:
        printer(out, results)
    raise typer.Exit(code)


def quiet_reporter() -> Reporter:
    """A reporter for commands that print only their result."""
    return lambda event: None
