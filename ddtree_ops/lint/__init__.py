"""What can be known before a load of many minutes: launch flags and settings against facts. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_ops.lint.model import Cite, Finding, Rule, Severity
    from ddtree_ops.lint.places import located
    from ddtree_ops.lint.run import RULES, lint, rules_table
    from ddtree_ops.lint.runtime import RuntimeFacts, facts_of

__all__ = [
    "RULES",
    "Cite",
    "Finding",
    "Rule",
    "RuntimeFacts",
    "Severity",
    "facts_of",
    "lint",
    "located",
    "rules_table",
]

_HOMES = {
    "Cite": "model",
    "Finding": "model",
    "Rule": "model",
    "RULES": "run",
    "RuntimeFacts": "runtime",
    "Severity": "model",
    "facts_of": "runtime",
    "lint": "run",
    "located": "places",
    "rules_table": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
