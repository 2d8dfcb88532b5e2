"""Words and times that lines for people have in common. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["count", "moment_of"]


def count(number: int, word: str) -> str:
    """``1 file``, ``3 patches``, ``2 entries``."""
    if number == 1:
        return f"{number} {word}"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{number} {word[:-1]}ies"
    return f"{number} {word}{'es' if word.endswith('ch') else 's'}"


def moment_of(text: str) -> datetime | None:
    """A time in ISO 8601, UTC where it names no zone; None where it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
