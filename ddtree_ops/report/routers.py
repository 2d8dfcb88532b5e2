"""Routers on a terminal: how they stand, what a deploy of one did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ddtree_ops.report.summary import say
from ddtree_ops.report.typed import typed

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_ops.deploy.router import RouterResult, RouterView

__all__ = ["print_router_result", "print_router_view"]

_STYLE = {"unchanged": "green", "deployed": "green", "planned": "cyan", "rolled-back": "yellow"}


def print_router_result(console: Console, result: RouterResult) -> None:
    """The diff of a plan, or the outcome, why, and what to type next."""
    if result.outcome == "planned":
        for line in result.diff:
            style = "green" if line.startswith("+") else "red" if line.startswith("-") else ""
            say(console, Text(line, style))
    text = Text.assemble(
        (f"{result.name} ", "bold cyan"), (result.outcome, _STYLE.get(result.outcome, "bold red"))
    )
    text.append(f" on {result.host}")
    if result.reasons and result.error is None:
        text.append(f": {'; '.join(result.reasons)}")
    say(console, text)
    if result.error is not None:
        say(console, Text(f"  {typed(result.error.render())}"))


def print_router_view(console: Console, view: RouterView) -> None:
    """A router, then a line a worker."""
    state = ("healthy", "green") if view.healthy else ("NOT healthy", "bold red")
    text = Text.assemble((f"{view.name} ", "bold cyan"), state, f" on {view.host}: {view.state.describe()}")
    say(console, text)
    if not view.state.exists:
        say(
            console,
            Text(f"  never deployed; next: {typed(f'ddtree-ops router deploy {view.name}')}", "yellow"),
        )
    elif not view.as_wished:
        say(console, Text("  the unit file is not what the inventory describes", "yellow"))
    for worker in view.workers if view.state.exists else ():
        say(console, Text(f"  {worker.describe()}", "" if worker.healthy else "red"))
    for url in view.strangers:
        say(console, Text(f"  {url}: a worker that the inventory does not name", "yellow"))
    if view.last is not None:
        verdict = view.last.verdict.value if view.last.verdict else "not judged"
        say(console, Text(f"  last {view.last.reason} {view.last.time} by {view.last.who}: {verdict}", "dim"))
