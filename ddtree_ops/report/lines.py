"""Lines on a terminal: folded between words, commands kept whole."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ddtree_ops.report.typed import typed

__all__ = ["folded", "indented", "say"]


def indented(console: Console, text: str, columns: int, style: str = "") -> None:
    """Lines of a text, ``columns`` blanks before each; commands in it as the user would have to type them."""
    for line in typed(text).splitlines():
        say(console, Text(line, style), indent=columns)


def say(console: Console, line: Text, *, indent: int = 0) -> None:
    """One line; on a terminal folded between words under itself, elsewhere whole, for people paste and grep it.

    No command and no word is broken: what is longer than the terminal is left for the terminal to fold.
    """
    if not console.is_terminal:
        console.print(Text(" " * indent).append_text(line), soft_wrap=True)
        return
    hang = indent + 2
    for number, part in enumerate(folded(line, max(console.width - hang, 20))):
        console.print(Text(" " * (hang if number else indent)).append_text(part), soft_wrap=True)


_WORD = r"(?:'[^']*'|[^\s;,()'])+"
_COMMAND = re.compile(
    rf"\b(?:ddtree-ops(?: -i {_WORD})?(?: (?:lock|patch|router|runtime|inventory|playbook|lab))?|systemctl|journalctl|ssh-keygen)"
    rf" {_WORD}(?: {_WORD})?(?: --?[a-z]{_WORD}(?: {_WORD})?| -[a-zA-Z]\b(?: {_WORD})?)*"
)


def folded(line: Text, width: int) -> list[Text]:
    """A line in parts of at most ``width`` columns, broken between words of prose: never inside a word or command."""
    words = [match.span() for match in re.finditer(r"\S+", line.plain)]
    kept = [match.span() for match in _COMMAND.finditer(line.plain)]
    whole = [word for word in words if not any(first < word[0] < end for first, end in kept)]
    breaks: list[int] = []
    for (start, _), following in zip(whole, [*whole[1:], (len(line.plain), 0)], strict=True):
        begin = breaks[-1] if breaks else 0
        text = line.plain[begin : following[0]].rstrip()
        if start > begin and line.plain[begin:start].strip() and cell_len(text) > width:
            breaks.append(start)
    parts = list(line.divide(breaks))
    for part in parts:
        part.rstrip()
    return parts
