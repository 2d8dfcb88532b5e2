"""Commands for lab hosts: ``lab up|down|status|ssh`` and ``demo``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ddtree_ops.cli.common import JsonOption, err, out, print_json
from ddtree_ops.errors import UsageError

__all__ = ["register"]

lab_app = typer.Typer(
    no_args_is_help=True, help="Real hosts on this machine: sshd, systemd, journald, a stand-in engine."
)

Names = Annotated[list[str] | None, typer.Argument(help="Lab hosts; default all.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(lab_app, name="lab")
    app.command("demo")(demo)


@lab_app.command("up")
def up(
    names: Names = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="As new: forget what the hosts have written.")
    ] = False,
    number: Annotated[
        int | None,
        typer.Option("--hosts", min=1, metavar="N", help="A fleet of N hosts alike, and its inventory."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="lab|sglang",
            help="sglang: the real one on the CPU too, with tiny models; default: the stand-in.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Build the image if needed and boot the hosts; those that run are left alone."""
    from ddtree_ops.lab import hosts
    from ddtree_ops.report.progress import progress_for

    if number is not None and names:
        raise UsageError("name the hosts, or say how many: not both")
    chosen = next((name for name in hosts.ENGINES if name == engine), None)
    if engine is not None and chosen is None:
        raise UsageError(
            f"--engine {engine}: there is none of this name", hint="--engine lab or --engine sglang"
        )
    if number is not None and chosen == "sglang":
        raise UsageError("a fleet has the stand-in engine: --hosts and --engine sglang exclude each other")
    with progress_for(err) as report:
        if fresh:
            hosts.down(names or (hosts.fleet_names(number) if number else None), progress=report)
        if number is not None:
            running, path = hosts.up_fleet(number, progress=report)
            out.print(f"{len(running)} hosts are up: {running[0].name} to {running[-1].name}", markup=False)
            out.print(f"next: ddtree-ops -i {path} deploy all", markup=False, soft_wrap=True)
            return
        running = hosts.up(names, engine=chosen, progress=report)
    for host in running:
        real = ", with the real sglang" if host.engine == "sglang" else ""
        out.print(f"{host.name} is up at {host.address}:{host.port}{real}", markup=False)
    inventory = "lab-real" if running[0].engine == "sglang" else "lab"
    out.print(f"next: ddtree-ops -i {inventory} deploy {running[0].name}", markup=False)


@lab_app.command("down")
def down(names: Names = None) -> None:
    """Power the hosts off, unmount and forget their disks."""
    from ddtree_ops.lab import hosts
    from ddtree_ops.report.progress import progress_for

    with progress_for(err) as report:
        hosts.down(names, progress=report)
    out.print("down")


@lab_app.command("status")
def status(as_json: JsonOption = False) -> None:
    """Which lab hosts run, where, since when."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from ddtree_ops.lab import hosts

    found = hosts.status()
    if as_json:
        print_json([asdict(host) for host in found])
        return
    for host in found:
        since = f" since {datetime.fromtimestamp(host.since, UTC):%Y-%m-%d %H:%M:%SZ}" if host.since else ""
        detail = f" ({host.detail})" if host.detail else ""
        real = ", with the real sglang" if host.engine == "sglang" else ""
        out.print(
            f"{host.name}  {host.user}@{host.address}:{host.port}  {host.state}{since}{real}{detail}",
            markup=False,
        )


@lab_app.command("ssh", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ssh(context: typer.Context, name: Annotated[str, typer.Argument(help="Lab host.")]) -> None:
    """Log in to a lab host, or run a command there."""
    from ddtree_ops.lab import hosts

    argv = hosts.ssh_argv(name, context.args)
    os.execvp(argv[0], argv)


def demo(
    keep: Annotated[
        bool, typer.Option("--keep/--down", help="Leave the lab hosts running afterwards.")
    ] = True,
) -> None:
    """Watch the main job on lab hosts: crash, diagnosis, fix, ready, smoke, bad change, rollback."""
    from ddtree_ops.cli.demo import run_demo

    raise typer.Exit(run_demo(keep=keep))
