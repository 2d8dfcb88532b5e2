"""A run report as it may be shown and kept: no secret, no letter that a terminal or an XML parser takes for a command."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ddtree_ops.report.typed import typed
from ddtree_ops.runreport import RunReport
from ddtree_ops.secret import MASK, is_secret_name, masked, redact

__all__ = ["clean", "visible"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")


def visible(text: str) -> str:
    """``text`` without what XML 1.0 forbids and terminals obey: line ends become ``\\n``, other controls are left out."""
    text = _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    return _CONTROL.sub("", text)


def _cleaned(value: Any, key: str = "") -> Any:
    if isinstance(value, str):
        return MASK if value and is_secret_name(key) else visible(redact(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {visible(masked(str(name))): _cleaned(each, str(name)) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(each, key) for each in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    return visible(redact(str(value)))


def clean(report: RunReport) -> RunReport:
    """The report with secrets masked, control characters left out, and no number that JSON has no word for.

    Commands in hints, remedies and errors name the inventory: who pastes one from a report has not given it before, and the
    hosts of another inventory may have the same names.
    """
    document = _cleaned(report.to_json())
    for target in document["targets"]:
        target["errors"] = [typed(each, elsewhere=True) for each in target["errors"]]
        for check in target["checks"]:
            check["hint"] = typed(check["hint"], elsewhere=True)
        for found in target["diagnoses"]:
            for one in (*found.get("diagnoses", ()), *found.get("consequences", ())):
                one["remedy"] = typed(one.get("remedy", ""), elsewhere=True)
    return RunReport.from_json(document)
