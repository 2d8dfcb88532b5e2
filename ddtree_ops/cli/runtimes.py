"""Commands about the engine's code: ``runtime build|show|verify|vendor`` and ``patch list|check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_ops.cli.common import InventoryOption, JsonOption, err, out, print_json
from ddtree_ops.errors import CheckFailed

__all__ = ["register"]

runtime_app = typer.Typer(no_args_is_help=True, help="Build and verify the pinned, patched SGLang.")
patch_app = typer.Typer(no_args_is_help=True, help="The patch series, and what a tree really holds.")

Name = Annotated[str, typer.Argument(help="Runtime of the inventory.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(runtime_app, name="runtime")
    app.add_typer(patch_app, name="patch")
