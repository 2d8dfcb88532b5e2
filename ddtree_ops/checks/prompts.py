"""Named prompts, or free text."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter

from ddtree_ops.errors import UsageError

__all__ = ["Prompt", "load_prompts", "resolve_prompt", "unmet"]

_PROMPTS = Path(__file__).with_name("prompts.yaml")


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    description: str = ""
    expect: tuple[Annotated[str, AfterValidator(_regex)], ...] = ()


class Prompt(_Entry):
    """A prompt; ``name`` is empty for free text, ``expect`` are regular expressions the answer must match."""

    name: str = ""


@cache
def load_prompts() -> dict[str, Prompt]:
    """The shipped prompts (``checks/prompts.yaml``) by name."""
    raw = TypeAdapter(dict[str, _Entry]).validate_python(yaml.safe_load(_PROMPTS.read_text("utf-8")))
    return {name: Prompt(name=name, **entry.model_dump()) for name, entry in raw.items()}


def resolve_prompt(name_or_text: str) -> Prompt:
    """A named prompt, else the text itself.

    :raises UsageError: empty text, or one word that is close to a known name: almost surely a misspelt one.
    """
    known = load_prompts()
    wanted = name_or_text.strip()
    if not wanted:
        raise UsageError("the prompt is empty", hint=f"name one of {', '.join(known)}, or write any text")
    if wanted.lower() in known:
        return known[wanted.lower()]
    if not any(char.isspace() for char in name_or_text):
        near = difflib.get_close_matches(wanted.lower(), known, n=3, cutoff=0.6)
        if near:
            raise UsageError(
                f"no prompt is named {wanted!r}",
                hint=f"did you mean {' or '.join(near)}? To send the word itself, add a space: '{wanted} '",
            )
    return Prompt(text=name_or_text)


def unmet(prompt: Prompt, answer: str) -> tuple[str, ...]:
    """The expectations of ``prompt`` that ``answer`` does not meet."""
    return tuple(pattern for pattern in prompt.expect if not re.search(pattern, answer))
