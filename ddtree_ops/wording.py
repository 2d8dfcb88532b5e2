"""Words that lines for people have in common. Pure."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, word: str) -> str:
    """``1 file``, ``3 patches``, ``2 entries``."""
    if number == 1:
        return f"{number} {word}"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{number} {word[:-1]}ies"
    return f"{number} {word}{'es' if word.endswith('ch') else 's'}"
