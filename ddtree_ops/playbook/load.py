"""Playbook files: finding and checking.

File shape (``schema: 1``)::

    name: deploy
    description: ...
    steps: [lint, preflight, build, push, verify, activate, wait, {smoke: {prompt: quicksort}}, signatures]
    on_failure: [capture, diagnose, rollback]
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddtree_ops.inventory.load import find_file
from ddtree_ops.inventory.yaml_source import (
    Document,
    KeyPath,
    Problem,
    check,
    config_error,
    display,
    load_document,
    suggestion,
)
from ddtree_ops.playbook.models import FAILURE_STEPS, STEPS, Playbook, Step, order_problems

__all__ = ["load_playbook", "playbook_schema", "resolve"]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = Field(alias="schema")
    name: str = ""
    description: str = ""
    steps: list[Any] = Field(min_length=1)
    on_failure: list[Any] = Field(default_factory=list)


def load_playbook(name_or_path: str | Path) -> Playbook:
    """Load and check a playbook by name (``./playbooks``, the user's, the shipped ones) or path.

    :raises ConfigError: with every problem found, one ``file:line: key.path: problem`` an entry of ``details``.
    """
    path = find_file(
        "playbooks",
        str(name_or_path),
        hint="name one of these, or the path of a file; what a shipped one does: ddtree-ops playbook show deploy",
    )
    hint = f"correct {display(path)} and run it again"
    document = load_document(path, hint=hint, defer=True)
    playbook, problems = resolve(document)
    if playbook is None or problems:
        raise config_error(
            document.source, problems, hint=hint, what="playbook", state="nothing was contacted or changed"
        )
    return playbook if playbook.name else playbook.model_copy(update={"name": path.stem})


def resolve(document: Document) -> tuple[Playbook | None, list[Problem]]:
    """Check a parsed playbook file. Pure.

    :returns: the playbook, or None, and every problem found (those of the text included).
    """
    shape, problems = check(document, _File)
    problems += document.problems
    if shape is None or document.problems:
        return None, problems
    parts: dict[str, list[Step]] = {}
    kinds: dict[str, list[str]] = {}
    for part, entries in (("steps", shape.steps), ("on_failure", shape.on_failure)):
        parts[part], kinds[part] = [], []
        for index, entry in enumerate(entries):
            kind, step, found = _step(document, (part, index), entry)
            kinds[part].append(kind)
            problems += found
            if step is not None:
                parts[part].append(step)
    problems += [
        document.problem(path, text) for path, text in order_problems(kinds["steps"], kinds["on_failure"])
    ]
    if problems:
        return None, problems
    return (
        Playbook(
            path=document.source,
            name=shape.name,
            description=shape.description,
            steps=tuple(parts["steps"]),
            on_failure=tuple(parts["on_failure"]),
        ),
        [],
    )


def _step(document: Document, path: KeyPath, entry: Any) -> tuple[str, Step | None, list[Problem]]:
    """Name, step (None where it is wrong) and problems of one list item."""
    kind: str
    body: Any = {}
    place = path
    if isinstance(entry, str):
        kind = entry
    elif isinstance(entry, dict) and len(entry) == 1:
        kind, body = next(iter(entry.items()))
        place = (*path, kind)
        body = {} if body is None else body
    else:
        shape = (
            "more than one key: begin each step with its own dash"
            if isinstance(entry, dict) and entry
            else "no step"
        )
        return (
            "",
            None,
            [document.problem(path, f"{shape}; write '- smoke' or '- smoke: {{prompt: quicksort}}'")],
        )
    model = STEPS.get(kind)
    if model is None:
        return kind, None, [document.problem(place, f"there is no step '{kind}'" + suggestion(kind, STEPS))]
    if not isinstance(body, dict):
        return kind, None, [document.problem(place, "expected a mapping of settings, or nothing")]
    if "kind" in body:
        return kind, None, [document.problem((*place, "kind"), "unknown key")]
    step, problems = check(document, model, place, data={"kind": kind, **body}, hidden=("kind",))
    return kind, step, problems


@cache
def playbook_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a playbook file, for editors."""
    single: dict[str, Any] = {}
    for kind, model in STEPS.items():
        settings = dict(model.model_json_schema()["properties"])
        settings.pop("kind")
        body = {"type": "object", "additionalProperties": False, "properties": settings}
        single[kind] = {"anyOf": [body, {"type": "null"}]}

    def steps(kinds: list[str]) -> dict[str, Any]:
        mapping = {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
            "properties": {kind: single[kind] for kind in kinds},
        }
        return {"type": "array", "items": {"anyOf": [{"enum": kinds}, mapping]}}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ddtree-ops playbook",
        "type": "object",
        "required": ["schema", "steps"],
        "additionalProperties": False,
        "properties": {
            "schema": {"const": 1},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "steps": {**steps(list(STEPS)), "minItems": 1},
            "on_failure": steps(list(FAILURE_STEPS)),
        },
    }
