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
from ddtree_ops.inventory.named import file_schema, list_schema, named
from ddtree_ops.inventory.yaml_source import (
    Document,
    KeyPath,
    Problem,
    check,
    config_error,
    display,
    load_document,
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
    example = "'- smoke' or '- smoke: {prompt: quicksort}'"
    kind, body, place, problems = named(document, path, entry, STEPS, noun="step", example=example)
    if body is None:
        return kind, None, problems
    if "kind" in body:
        return kind, None, [document.problem((*place, "kind"), "unknown key")]
    step, problems = check(document, STEPS[kind], place, data={"kind": kind, **body}, hidden=("kind",))
    return kind, step, problems


@cache
def playbook_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a playbook file, for editors."""
    settings = {kind: dict(model.model_json_schema()["properties"]) for kind, model in STEPS.items()}
    for properties in settings.values():
        properties.pop("kind")
    lists = {
        "steps": list_schema(settings),
        "on_failure": list_schema({kind: settings[kind] for kind in FAILURE_STEPS}),
    }
    return file_schema("ddtree-ops playbook", lists, required=("steps",))
