"""The ``ddtree-ops`` command."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from ddtree_ops import __version__
from ddtree_ops.cli import (
    deploying,
    describing,
    doctor,
    guarding,
    labs,
    linting,
    looking,
    observing,
    operating,
    planning,
    releases,
    router,
    runtimes,
)
from ddtree_ops.cli.common import selecting
from ddtree_ops.errors import ExitCode, OpsError
from ddtree_ops.report.typed import remember_inventory, typed

__all__ = ["app", "main"]

app = typer.Typer(
    name="ddtree-ops",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Deploy a patched SGLang with DDTree speculative decoding to bare-metal GPU hosts, and prove that it works.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree-ops {__version__}")
        raise typer.Exit


@app.callback()
def root(
    inventory: Annotated[
        str | None, typer.Option("--inventory", "-i", metavar="NAME|PATH", help="Inventory for all commands.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Options before the command."""
    if inventory is not None:
        os.environ["DDTREE_OPS_INVENTORY"] = inventory
        remember_inventory(inventory)


for module in (
    deploying,
    guarding,
    operating,
    releases,
    planning,
    linting,
    doctor,
    looking,
    observing,
    describing,
    router,
    runtimes,
    labs,
):
    module.register(app)
selecting(app)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A cancelled CI job or a closed laptop ends a deployment as Ctrl-C does: saying what was left how."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: every error that can be explained is printed here, without a traceback."""
    # Else the interpreter looks for garbage in all that was imported, for a tenth of a second at its end.
    atexit.register(gc.freeze)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no "✓" is no reason to die half way
            stream.reconfigure(errors="replace")
    try:
        app()
    except OpsError as error:
        from ddtree_ops.cli.common import err

        err.print(f"error: {typed(error.render())}", markup=False, soft_wrap=True)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.ERROR))
