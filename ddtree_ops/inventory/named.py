"""Files with lists of names, each bare or with settings: the steps of a playbook, the checks of a suite. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ddtree_ops.inventory.yaml_source import Document, KeyPath, Problem, suggestion

__all__ = ["file_schema", "list_schema", "named"]


def named(
    document: Document, path: KeyPath, entry: Any, known: Iterable[str], *, noun: str, example: str
) -> tuple[str, dict[str, Any] | None, KeyPath, list[Problem]]:
    """Name, settings and place of one list item: ``smoke``, or ``{smoke: {prompt: quicksort}}``.

    :param known: the names there are. :param noun: what they name. :param example: how one is written.
    :returns: settings None where something is wrong, and what; the name is empty where there is none.
    """
    body: Any = {}
    place = path
    if isinstance(entry, str):
        name = entry
    elif isinstance(entry, dict) and len(entry) == 1:
        ((key, body),) = entry.items()
        name, place, body = str(key), (*path, key), {} if body is None else body
    else:
        shape = (
            f"more than one key: begin each {noun} with its own dash"
            if isinstance(entry, dict) and entry
            else f"no {noun}"
        )
        return "", None, path, [document.problem(path, f"{shape}; write {example}")]
    names = tuple(known)
    if name not in names:
        text = f"there is no {noun} '{name}'{suggestion(name, names)}"
        return name, None, place, [document.problem(place, text)]
    if not isinstance(body, dict):
        return name, None, place, [document.problem(place, "expected a mapping of settings, or nothing")]
    return name, body, place, []


def list_schema(
    settings: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """JSON Schema of such a list.

    :param settings: by name, the schema of each setting. :param titles: by name, what it does.
    """
    single: dict[str, Any] = {}
    for name, properties in settings.items():
        body = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
        single[name] = {"anyOf": [body, {"type": "null"}]}
        if titles:
            single[name]["description"] = titles[name]
    mapping = {
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
        "properties": single,
    }
    return {"type": "array", "items": {"anyOf": [{"enum": list(single)}, mapping]}}


def file_schema(
    title: str, lists: Mapping[str, Mapping[str, Any]], required: Container[str]
) -> dict[str, Any]:
    """JSON Schema (2020-12) of a file that holds such lists, for editors.

    :param lists: by key. :param required: keys that must be there, and not be empty.
    """
    properties = {
        key: {**schema, **({"minItems": 1} if key in required else {})} for key, schema in lists.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "type": "object",
        "required": ["schema", *(key for key in lists if key in required)],
        "additionalProperties": False,
        "properties": {
            "schema": {"const": 1},
            "name": {"type": "string"},
            "description": {"type": "string"},
            **properties,
        },
    }
