"""The ``ddtree-ops`` command."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Annotated

import typer

from ddtree_ops import __version__, paths
from ddtree_ops.cli import (
    benching,
    deploying,
    describing,
    diagnosing,
    doctor,
    guarding,
    labs,
    linting,
    logs,
    looking,
    nightly,
    observing,
    operating,
    planning,
    releases,
    router,
    runtimes,
    signatures,
    validating,
)
from ddtree_ops.cli.common import selecting
from ddtree_ops.cli.helping import helping
from ddtree_ops.errors import ExitCode, OpsError, heeding
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
        os.environ["DDTREE_OPS_INVENTORY"] = os.environ[paths.INVENTORY_BY_OPTION] = inventory
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
    validating,
    benching,
    nightly,
    logs,
    diagnosing,
    describing,
    signatures,
    router,
    runtimes,
    labs,
):
    module.register(app)
selecting(app)
helping(app)


@contextlib.contextmanager
def _only(word: str) -> Iterator[None]:
    """With only the command of this name: Typer builds all there are at every start, a tenth of a short command."""
    known = app.registered_commands, app.registered_groups
    commands = [one for one in app.registered_commands if one.name == word]
    groups = [one for one in app.registered_groups if one.name == word]
    if commands or groups:
        app.registered_commands, app.registered_groups = commands, groups
    try:
        yield
    finally:
        app.registered_commands, app.registered_groups = known


def _command_in(words: list[str]) -> str:
    """The command that is called; empty where none is, or the shell asks for completions."""
    rest = iter(words if "_DDTREE_OPS_COMPLETE" not in os.environ else ())
    for word in rest:
        if word in ("-i", "--inventory"):
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""


class _Interruption:
    """A cancelled CI job or a closed laptop ends a deployment as Ctrl-C does: saying what was left how.

    What comes within seconds of the first is taken for the same one: a CI runner, a terminal and its shell send several
    signals one after the other, and the second would keep from being said what the first one left.
    """

    SAME_S = 3.0

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= self.SAME_S:
            self._last = now
            raise KeyboardInterrupt

    def again(self) -> None:
        """Send it once more: the last one had no effect."""
        self._last = float("-inf")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def install(self) -> None:
        """Take Ctrl-C, SIGTERM and SIGHUP, but for what whoever started us has them ignored (nohup)."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self)


@contextlib.contextmanager
def _no_interruption_lost(interruption: _Interruption) -> Iterator[None]:
    """An interruption stays one where a failure took its place; one that came while an object was finalised ends
    nothing, and is sent once more."""
    before = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, interruption.again).start()
        else:
            before(lost)

    sys.unraisablehook = unraisable
    try:
        with heeding():
            yield
    finally:
        sys.unraisablehook = before


def main() -> None:
    """Entry point: every error that can be explained is printed here, without a traceback."""
    # Else the interpreter looks for garbage in all that is imported, again and again, and once more at its end.
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    # Pydantic looks through the metadata of all installed packages for plug-ins; there are none for us.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    interruption = _Interruption()
    interruption.install()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that knows no "✓" is no reason to die half way
            stream.reconfigure(errors="replace")
    try:
        with _only(_command_in(sys.argv[1:])), _no_interruption_lost(interruption):
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
