"""A string that does not print itself."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["MASK", "Secret", "redact"]

MASK = "********"

_KEY = (
    r"(?:[\w-]*api[_-]?key|[\w-]*(?:access|auth|bearer|hf|hub|refresh)[_-]?token"
    r"|[\w-]*password|[\w-]*secret(?:[_-]?key)?|authorization)"
)
_PATTERNS = (
    re.compile(rf"(?i)(?<![\w-])(--?{_KEY}[= ]+)('[^']*'|\"[^\"]*\"|\S+)"),
    re.compile(rf"(?i)(?<![\w-])([\"']?{_KEY}[\"']?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|(?:Bearer\s+)?[^\s,;)\]}}]+)"),
)


def redact(text: str, *secrets: str) -> str:
    """``text`` with known secret values and the values of secret-looking keys masked.

    Keys that merely count tokens (``max_total_num_tokens``, ``#token``) are kept.
    """
    for value in secrets:
        if value:
            text = text.replace(value, MASK)

    def mask(match: re.Match[str]) -> str:
        value = match.group(2).strip("'\"")
        if value in {"None", "null", "true", "false", "True", "False", ""}:
            return match.group(0)
        return match.group(1) + MASK

    for pattern in _PATTERNS:
        text = pattern.sub(mask, text)
    return text


class Secret:
    """Holds a secret; ``str``, ``repr``, formatting and YAML/JSON dumps show :data:`MASK`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself: only for the sink that needs it (a request header, a process's stdin)."""
        return self._value

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> Any:
        raise TypeError("a Secret is never pickled")
