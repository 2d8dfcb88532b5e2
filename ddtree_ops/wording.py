"""Words that lines for people have in common. Pure."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, word: str) -> str:
    """``1 file``, ``3 patches``."""
    if number == 1:
        return f"{number} {word}"
    return f"{number} {word}{'es' if word.endswith('ch') else 's'}"
