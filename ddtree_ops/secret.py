"""A string that does not print itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "Secret", "is_secret_name", "redact", "secret_values"]

MASK = "********"

_KEY = (
    r"(?:[\w-]*api[_-]?key|[\w-]*(?:access|auth|bearer|hf|hub|refresh)[_-]?token"
    r"|[\w-]*password|[\w-]*secret(?:[\w-]*key)?|authorization)"
)
_PATTERNS = (
    re.compile(rf"(?i)(?<![\w-])(--?{_KEY}[= ]+)('[^']*'|\"[^\"]*\"|\S+)"),
    re.compile(
        rf"(?i)(?<![\w-])([\"']?{_KEY}[\"']?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|(?:Bearer\s+)?[^\s,;)\]}}]+)"
    ),
)


_SECRET_WORDS = frozenset(
    (
        "APIKEY",
        "AUTH",
        "BEARER",
        "CREDENTIAL",
        "CREDENTIALS",
        "KEY",
        "PASSPHRASE",
        "PASSWD",
        "PASSWORD",
        "PAT",
        "SECRET",
        "SECRETS",
        "TOKEN",
    )
)
_SHORTEST = 4


def is_secret_name(name: str) -> bool:
    """True for the name of a variable whose value nobody should see: ``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``.

    Whole words count, so ``TOKENIZERS_PARALLELISM`` and ``LAB_TOKENS_PER_S`` are no secrets.
    """
    return not _SECRET_WORDS.isdisjoint(re.split(r"[_.-]", name.upper()))


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values to hand to :func:`redact`, longest first; those too short to be told from other text are left out."""
    found = {value for name, value in variables.items() if is_secret_name(name) and len(value) >= _SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


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
