"""Strings that do not print themselves, and text without them.

What this process has :func:`learned <learn>` to be a secret is masked by every :func:`redact` from then on, whoever
calls it: the journal's reader, errors, reports. Nothing is ever unlearned.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "KEY_SHAPE",
    "MASK",
    "SHORTEST",
    "Secret",
    "is_secret_flag",
    "is_secret_name",
    "learn",
    "masked",
    "redact",
    "secret_values",
]

MASK = "********"

_KEY = (
    r"(?:[\w-]*api[_-]?key|[\w-]*(?:access|auth|bearer|hf|hub|refresh)[_-]?token"
    r"|[\w-]*password|[\w-]*secret(?:[\w-]*key)?|authorization)"
)
_QUOTED = r"""'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""""
KEY_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b"
)
"""What looks like an access key whatever its name: of Hugging Face, OpenAI, GitHub, AWS."""
_PATTERNS = (
    re.compile(rf"(?i)(?<![\w-])(--?{_KEY}[= ]+)({_QUOTED}|\S+)"),
    re.compile(rf"(?i)(?<![\w-])([\"']?{_KEY}[\"']?\s*[=:]\s*)({_QUOTED}|(?:Bearer\s+)?[^\s,;)\]}}]+)"),
)
_KEY_WORDS = ("key", "password", "secret", "authorization")
_TOKEN_WORDS = ("access", "auth", "bearer", "hf", "hub", "refresh")
_KEY_HEADS = ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "AKIA")
"""Text without any of these needs no search: nearly every line of a log."""


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
SHORTEST = 8
"""Characters below which a value cannot be told from other text, so that masking it would garble everything."""
_SHORTEST = 4
_learned: tuple[str, ...] = ()
_learning = threading.Lock()


def is_secret_name(name: str) -> bool:
    """True for the name of a variable whose value nobody should see: ``HF_TOKEN``, ``AWS_SECRET_ACCESS_KEY``.

    Whole words count, so ``TOKENIZERS_PARALLELISM`` and ``LAB_TOKENS_PER_S`` are no secrets.
    """
    return not _SECRET_WORDS.isdisjoint(re.split(r"[_.-]", name.upper()))


def secret_values(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Values to hand to :func:`redact`, longest first; those too short to be told from other text are left out."""
    found = {value for name, value in variables.items() if is_secret_name(name) and len(value) >= _SHORTEST}
    return _longest_first(found)


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def learn(*values: Secret | str) -> None:
    """Have every later :func:`redact` mask these values, as they are, quoted as Python and JSON do, and line by line.

    Values of fewer than :data:`SHORTEST` characters are left out.
    """
    global _learned
    found: set[str] = set()
    for value in values:
        text = value.reveal() if isinstance(value, Secret) else value
        for part in (text, *text.splitlines()):
            forms = (
                part,
                repr(part)[1:-1],
                json.dumps(part)[1:-1],
                json.dumps(part, ensure_ascii=False)[1:-1],
            )
            found.update(form for form in forms if len(part.strip()) >= SHORTEST)
    with _learning:
        if not found <= set(_learned):
            _learned = _longest_first({*_learned, *found})


def masked(text: str) -> str:
    """``text`` without the learned values, and otherwise as it is: for whole documents."""
    for value in _learned:
        text = text.replace(value, MASK)
    return text


def redact(text: str, *secrets: str) -> str:
    """``text`` with learned and given secret values and the values of secret-looking keys masked.

    Keys that merely count tokens (``max_total_num_tokens``, ``#token``) are kept.
    """
    for value in _longest_first({*_learned, *secrets}) if secrets else _learned:
        if value:
            text = text.replace(value, MASK)

    def mask(match: re.Match[str]) -> str:
        value = match.group(2).strip("'\"")
        if value in {"None", "null", "true", "false", "True", "False", ""}:
            return match.group(0)
        return match.group(1) + MASK

    folded = text.casefold()
    if any(word in folded for word in _KEY_WORDS) or (
        "token" in folded and any(word in folded for word in _TOKEN_WORDS)
    ):
        for pattern in _PATTERNS:
            text = pattern.sub(mask, text)
    return KEY_SHAPE.sub(MASK, text) if any(head in text for head in _KEY_HEADS) else text


def is_secret_flag(key: str) -> bool:
    """What follows ``--key`` on a command line is a secret: :func:`redact` masks it."""
    return redact(f"--{key} x") != f"--{key} x"


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

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a Secret is never pickled")
