"""Commands that only look: ``smoke``, ``logs``, ``diagnose``."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_ops.cli.common import Hosts, InventoryOption, JsonOption, ServiceOption, err, open_session, out, print_json, targets_of

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
