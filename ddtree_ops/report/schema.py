"""The JSON Schema of ``report.json``, made from the classes that it is read into. Pure.

``docs/report.schema.json`` is this schema; a test holds the two together. ``python -m ddtree_ops.report.schema`` prints it.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from ddtree_ops.results import CheckResult, Evidence, Figure, Verdict
from ddtree_ops.runreport import SCHEMA, RunReport, TargetReport

__all__ = ["report_schema", "schema_text"]

_CLASSES: tuple[type, ...] = (RunReport, TargetReport, CheckResult, Figure, Evidence)
_MORE: dict[type, dict[str, Any]] = {
    RunReport: {
        "schema": {"const": SCHEMA, "description": "version of the form"},
        "verdict": {
            "$ref": "#/$defs/Verdict",
            "description": "worst of its targets; never a pass where complete is false",
        },
    },
    TargetReport: {
        "verdict": {"$ref": "#/$defs/Verdict", "description": "worst of its checks; fail with an error"}
    },
}


def _said(kind: type) -> dict[str, str]:
    """What the docstring of a class says of its fields."""
    text = inspect.getdoc(kind) or ""
    found = re.findall(r"^:param (\w+):(.*?)(?=^:param|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.split()).replace("``", "`") for name, words in found}


def report_schema() -> dict[str, Any]:
    """Draft 2020-12. Every field is required, for every report has them all; more may come within a version."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(RunReport).json_schema(mode="serialization")
    parts = {**schema.pop("$defs"), "RunReport": schema}
    for kind in _CLASSES:
        part = parts[kind.__name__]
        part["description"] = (inspect.getdoc(kind) or "").partition("\n")[0]
        part.pop("title", None)
        part["properties"] = {**_MORE.get(kind, {}), **part["properties"]}
        said = _said(kind)
        for name, each in part["properties"].items():
            for key in ("title", "default"):
                each.pop(key, None)
            if name in said:
                each["description"] = said[name]
            for inner in (each, each.get("items", {})):
                if inner.get("additionalProperties") is True:
                    del inner["additionalProperties"]
        part["required"] = list(part["properties"])
    parts["Verdict"] = {
        "enum": [verdict.value for verdict in Verdict],
        "description": "outcome; no data is never a pass: it is inconclusive",
    }
    del parts["RunReport"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "report.json of ddtree-ops",
        **schema,
        "$defs": dict(sorted(parts.items())),
    }


def schema_text() -> str:
    """The schema as it stands in the file."""
    return json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
