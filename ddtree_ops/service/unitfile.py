"""What a unit file says, read back: the inverse of the quoting of :mod:`ddtree_ops.service.unit`. Pure.

Only what needs no knowledge of the host is understood: words, quotes, escapes, ``%%`` and ``$$``. A line that systemd
would expand in another way (``%h``, ``$VAR``, several ``ExecStart``) is not guessed at: the answer is None.

Sources: ``systemd.syntax(7)``, ``systemd.service(5)``, ``systemd.exec(5)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["environment_of", "exec_start_of", "flags_of", "settings"]

_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "s": 32, "\\": 92, '"': 34, "'": 39}
_REFERENCE = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIALS = "${CREDENTIALS_DIRECTORY}"
"""The one variable that our own units have systemd expand; it is kept as it stands."""


def settings(text: str) -> Iterator[tuple[str, str, str]]:
    """``(section, key, value)`` of every assignment, continuation lines joined by a blank as systemd joins them."""
    section = ""
    parts: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        whole = " ".join([*parts, line]).strip()
        parts = []
        if whole.startswith("[") and whole.endswith("]"):
            section = whole[1:-1]
        elif "=" in whole:
            key, _, value = whole.partition("=")
            yield section, key.strip(), value.strip()


def _words(text: str, *, dollar: bool) -> list[str] | None:
    """Words of a value, unquoted; None where something in it only systemd can expand, or a quote is left open."""
    words: list[str] = []
    word = bytearray()
    inside = False
    quote = ""
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if quote and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote, inside = character, True
        elif not quote and character in " \t\n\r":
            if inside:
                words.append(word.decode("utf-8", "surrogateescape"))
                word, inside = bytearray(), False
        elif character == "\\":
            found = _escape(text[position:])
            if found is None:
                return None
            word += found[0]
            position += found[1]
            inside = True
        elif dollar and character == "$" and (match := _REFERENCE.match(text, position)):
            word += f"${match[0]}".encode()
            position = match.end()
            inside = True
        elif dollar and text.startswith(_CREDENTIALS, position - 1):
            word += _CREDENTIALS.encode()
            position += len(_CREDENTIALS) - 1
            inside = True
        elif character == "%" or (dollar and character == "$"):
            if text[position : position + 1] != character:
                return None
            word += character.encode()
            position += 1
            inside = True
        else:
            word += character.encode("utf-8", "surrogateescape")
            inside = True
    if quote:
        return None
    if inside:
        words.append(word.decode("utf-8", "surrogateescape"))
    return words


def _escape(rest: str) -> tuple[bytes, int] | None:
    """Bytes of an escape and the characters it takes, after its backslash."""
    if rest[:1] in _ESCAPES:
        return bytes([_ESCAPES[rest[0]]]), 1
    if match := re.match(r"x([0-9a-fA-F]{2})", rest):
        return bytes([int(match[1], 16)]), 3
    if match := re.match(r"u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})", rest):
        return chr(int(match[1] or match[2], 16)).encode("utf-8", "surrogatepass"), len(match[0])
    if match := re.match(r"[0-3][0-7]{2}", rest):
        return bytes([int(match[0], 8)]), 3
    return None


def exec_start_of(text: str) -> list[str] | None:
    """Words of the one ``ExecStart``; None where it is not there or cannot be told.

    They are as the process gets them, but for ``${NAME}``, which systemd takes from the unit's environment.
    """
    lines = [value for section, key, value in settings(text) if (section, key) == ("Service", "ExecStart")]
    if len(lines) != 1 or lines[0][:1] in "-@:+!":
        return None
    words = _words(lines[0], dollar=True)
    return None if not words or ";" in words else words


def environment_of(text: str) -> dict[str, str] | None:
    """Variables of ``Environment=``; an empty assignment clears what came before. None where it cannot be told."""
    found: dict[str, str] = {}
    for section, key, value in settings(text):
        if (section, key) != ("Service", "Environment"):
            continue
        if not value:
            found.clear()
            continue
        words = _words(value, dollar=False)
        if words is None:
            return None
        for word in words:
            name, equals, content = word.partition("=")
            if not equals or not _NAME.fullmatch(name):
                return None
            found[name] = content
    return found


def flags_of(argv: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """A command line as its words before the first flag, and flag -> words after it.

    ``--flag=value`` is ``--flag value``. Of a flag given twice the last counts, as argparse has it.
    """
    head: list[str] = []
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            flags[name] = (value,) if equals else ()
        elif name:
            flags[name] = (*flags[name], word)
        else:
            head.append(word)
    return tuple(head), flags
