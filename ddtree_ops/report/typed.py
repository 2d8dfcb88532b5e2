"""Commands in hints and remedies, as the user would have to type them here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

__all__ = ["commands_in", "remember_inventory", "typed"]

_COMMANDS = [
    "apply",
    "audit",
    "bench",
    "confirm",
    "deploy",
    "diagnose",
    "doctor",
    "drift",
    "history",
    "inventory",
    "lint",
    "lock",
    "logs",
    "nightly",
    "plan",
    "prune",
    "releases",
    "restart",
    "rollback",
    "router",
    "run",
    "runtime",
    "smoke",
    "start",
    "status",
    "stop",
    "validate",
    "wait",
]
_COMMAND = re.compile(rf"\bddtree-ops (?=(?:{'|'.join(_COMMANDS)}|patch check)\b)(?![^;\n]* -i )")
_ANY_COMMAND = (
    r"\b(?:ddtree-ops|systemctl|journalctl|sudo|ssh|nvidia-smi)(?: (?!(?:and|or|then|on|to|which|where|for|shows|says|lists|"
    r"tells|gives|names|reads|with|again|until|once|after|before|that|is|does|has|of|wrote|first)\b)[^\s`|,;()]+(?:,[^\s`|,;()]+)*)+"
)
"""A command within a sentence: up to a comma, a bracket, or a word that goes on with the sentence. Compiled when it is needed."""
_given: list[str] = []
_VARIABLE = "DDTREE_OPS_INVENTORY"


def remember_inventory(name: str | None) -> None:
    """The user named an inventory on the command line: commands that we print name it too. None forgets it."""
    _given[:] = [] if name is None else [name]


def typed(text: str, *, elsewhere: bool = False) -> str:
    """``text`` with ``-i NAME`` added to the commands in it, where the user gave one.

    :param elsewhere: it is read in another shell, as a report is: the inventory is named where a variable gave it too.
    """
    given = [*_given, *([os.environ[_VARIABLE]] if elsewhere and os.environ.get(_VARIABLE) else [])]
    if not given:
        return text
    words = f"ddtree-ops -i {shlex.quote(given[0])} "
    return _COMMAND.sub(lambda match: words, text)


def commands_in(text: str) -> Iterator[tuple[int, str]]:
    """The commands within a sentence, each with the place where it begins. Pure."""
    for found in re.finditer(_ANY_COMMAND, text):
        yield found.start(), found[0].partition(": ")[0].rstrip(".:")
