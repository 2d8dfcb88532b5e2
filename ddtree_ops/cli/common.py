"""What the commands share: options, consoles, selection, the way results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ddtree_ops.errors import ExitCode, OpsError, UsageError
from ddtree_ops.report.output import Output

if TYPE_CHECKING:
    from ddtree_ops.inventory.models import Inventory, RuntimeSpec, Target
    from ddtree_ops.remote.session import Session

__all__ = [
    "Hosts",
    "InventoryOption",
    "JsonOption",
    "RuntimeOption",
    "ServiceOption",
    "SetOption",
    "err",
    "is_path",
    "leave",
    "on_all",
    "open_session",
    "out",
    "play",
    "print_json",
    "runtime_spec",
    "targets_of",
]

_T = TypeVar("_T")
_FILE_ENDINGS = frozenset((".json", ".log", ".txt", ".whl"))

out = Output()
err = Output(stderr=True)

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
    from ddtree_ops.report.typed import remember_inventory

    if inventory is not None:
        remember_inventory(inventory)
    loaded = load_inventory(inventory)
    targets = select(loaded, list(hosts or ()), service=service, default_all=default_all)
    if runtime is not None:
        runtime_spec(loaded, runtime)
    wanted = [*(settings or ()), *([f"runtime={runtime}"] if runtime is not None else ())]
    return loaded, [override(target, wanted, inventory=loaded) for target in targets]


def runtime_spec(inventory: Inventory, name: str) -> RuntimeSpec:
    """A runtime of the inventory.

    :raises UsageError: there is none of that name; names the nearest.
    """
    from ddtree_ops.inventory.yaml_source import suggestion

    if name not in inventory.runtimes:
        raise UsageError(
            f"no runtime '{name}' in {inventory.path}{suggestion(name, inventory.runtimes)}",
            hint=f"it has: {', '.join(inventory.runtimes)}",
        )
    return inventory.runtimes[name]


def open_session(target: Target) -> Session:
    """A session to the target's host."""
    from ddtree_ops.inventory import connect_spec
    from ddtree_ops.remote import connect

    return connect(connect_spec(target.host))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    try:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        out.on_broken_pipe()


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
    import fabric  # noqa: F401  before the threads that connect: from then on they wait for hosts, not for this one

    from ddtree_ops.remote.ahead import Ahead

    first = {target.host.name: target for target in targets}
    with Ahead((name, partial(open_session, target)) for name, target in first.items()) as sessions:
        from ddtree_ops.playbook.load import load_playbook
        from ddtree_ops.playbook.run import exit_code, run_playbook
        from ddtree_ops.report.progress import progress_for

        if not as_json:
            from ddtree_ops.report.summary import print_results
        playbook = load_playbook(playbook_name)
        if overrides:
            playbook = playbook.with_arguments(overrides)
        with progress_for(err if as_json else out) as report:
            results = run_playbook(
                playbook, targets, connect=lambda target: sessions.take(target.host.name), report=report
            )
    if as_json:
        print_json([result.to_json() for result in results])
    else:
        print_results(out, results)
    raise typer.Exit(int(exit_code(results)))


def on_all(targets: Sequence[Target], action: Callable[[Target], _T]) -> list[_T | OpsError]:
    """Every host to its end; an error takes the place of the host's outcome."""

    def one(target: Target) -> _T | OpsError:
        try:
            return action(target)
        except OpsError as error:
            return error.at(host=target.name)

    if len(targets) == 1:
        return [one(targets[0])]
    with ThreadPoolExecutor(max_workers=min(16, len(targets))) as pool:
        return list(pool.map(one, targets))


def leave(failed: Sequence[OpsError], code: ExitCode | None) -> None:
    """Print the errors and leave with the worst code; ``code`` is that of the hosts without one, None: no such host."""
    from ddtree_ops.playbook.run import worst_code
    from ddtree_ops.report.typed import typed

    for error in failed:
        err.print(f"error: {typed(error.render())}", markup=False, soft_wrap=True)
    codes = [error.exit_code for error in failed]
    raise typer.Exit(int(worst_code(codes if code is None else [*codes, code])))


def is_path(word: str) -> bool:
    """A file or folder rather than a name of the inventory: it is there, or is written like a path."""
    path = Path(word)
    return path.exists() or "/" in word or path.suffix in _FILE_ENDINGS
