"""How ``--help`` is laid out: paragraphs as wide as the terminal, and words for what an option takes."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

__all__ = ["Command", "helping"]


class Command(TyperCommand):
    """A command whose help is made for people when it is asked for, and not before."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.help = unwrapped(self.help or "")
        for param in self.get_params(ctx):
            if isinstance(param, TyperArgument):  # its name says what it is
                vars(param)["display_type_rich"] = lambda ctx: ""
            if param.metavar is not None:
                continue
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
            elif isinstance(param, TyperOption):
                param.metavar = max(param.opts, key=len).lstrip("-").upper()
            elif isinstance(param, TyperArgument):
                param.metavar = (param.name or "").upper()
        super().format_help(ctx, formatter)


def unwrapped(text: str) -> str:
    """Paragraphs of a docstring, each on one line: the terminal folds them, not the source. Pure."""
    return "\n\n".join(re.sub(r"\s*\n\s*", " ", paragraph) for paragraph in text.split("\n\n"))


def helping(app: typer.Typer) -> None:
    """Give every command such a help."""
    for info in app.registered_commands:
        info.cls = Command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            helping(group.typer_instance)
