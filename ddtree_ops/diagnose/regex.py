"""Regular expressions that take linear time whatever the text: RE2, with the part of :mod:`re` that signatures use.

RE2 has no lookaround and no back-references; ``\\d``, ``\\w``, ``\\s`` and ``\\b`` know ASCII only, ``$`` without
``(?m)`` is the very end of the text (``\\z`` too; there is no ``\\Z``), and a count is at most ``{1000}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import re2

__all__ = ["Match", "Pattern", "RegexError", "any_of", "compile", "compile_bytes"]

_REFUSED = (
    (re.compile(r"\(\?<?[=!]"), "RE2 has no lookahead or lookbehind: match the text around it instead"),
    (re.compile(r"\(\?P=|\\[1-9]"), "RE2 has no back-references: name what may follow instead"),
    (
        re.compile(r"\(\?[>(]|[*+?}]\+"),
        "RE2 has no atomic groups, conditions or possessive repeats: it never backtracks",
    ),
    (re.compile(r"\\Z"), r"for the end of the text write \z"),
    (re.compile(r"\{\d*,?\d{4,}"), "RE2 counts to 1000 at most"),
)


class RegexError(ValueError):
    """RE2 refuses a pattern; the text says why, and what to write instead."""


class Match:
    """A match: what :class:`re.Match` offers of groups, and :attr:`span` in bytes of UTF-8."""

    __slots__ = ("_found", "_index", "span")

    def __init__(self, found: Any, index: Mapping[str, int]) -> None:
        self._found = found
        self._index = index
        self.span: tuple[int, int] = found.span()

    def group(self, key: int | str = 0) -> str | None:
        """Text of a group, None where it took no part. :raises IndexError: no such group."""
        if isinstance(key, str):
            if key not in self._index:
                raise IndexError(f"no such group: {key}")
            key = self._index[key]
        value = self._found.group(key)
        return None if value is None else value.decode("utf-8", "replace")

    def __getitem__(self, key: int | str) -> str | None:
        return self.group(key)

    def groupdict(self) -> dict[str, str]:
        """Named groups that took part in the match."""
        found = ((name, self.group(number)) for name, number in self._index.items())
        return {name: value for name, value in found if value is not None}


class Pattern:
    """A compiled pattern. Searching takes time linear in the length of the text."""

    __slots__ = ("_compiled", "groupindex", "pattern")

    def __init__(self, pattern: str) -> None:
        options = re2.Options()
        options.log_errors = False
        options.max_mem = 64 << 20
        try:
            self._compiled = re2.compile(pattern.encode("utf-8"), options)
        except (re2.error, UnicodeEncodeError) as error:
            reason = error.args[0] if error.args else ""
            reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
            hints = [hint for tell, hint in _REFUSED if tell.search(pattern)]
            raise RegexError("; ".join([reason, *hints])) from error
        self.pattern = pattern
        self.groupindex: Mapping[str, int] = {
            (name.decode("utf-8") if isinstance(name, bytes) else name): number
            for name, number in self._compiled.groupindex.items()
        }

    @property
    def groups(self) -> frozenset[str]:
        """Names of the named groups."""
        return frozenset(self.groupindex)

    def __repr__(self) -> str:
        return f"compile({self.pattern!r})"

    def search(self, text: str) -> Match | None:
        """The leftmost match anywhere in ``text``, or None."""
        found = self._compiled.search(text.encode("utf-8", "replace"))
        return None if found is None else Match(found, self.groupindex)

    def match(self, text: str) -> Match | None:
        """A match at the start of ``text``, or None."""
        found = self._compiled.match(text.encode("utf-8", "replace"))
        return None if found is None else Match(found, self.groupindex)


@lru_cache(maxsize=1024)
def compile(pattern: str) -> Pattern:
    """Compile for RE2.

    :raises RegexError: RE2 refuses it; a ValueError whose text says what and what to write instead.
    """
    return Pattern(pattern)


def compile_bytes(pattern: bytes) -> Any:
    """Compile for searching whole chunks of a log: bytes, and no groups. :raises re2.error: RE2 refuses it."""
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.never_capture = True
    options.log_errors = False
    options.max_mem = 256 << 20
    return re2.compile(pattern, options)


def any_of(texts: Iterable[str]) -> Pattern | None:
    """A pattern that finds any of the plain texts; None without one."""
    escaped = [re2.escape(text) for text in texts]
    return compile("|".join(escaped)) if escaped else None
