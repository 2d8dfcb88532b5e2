"""All rules over one target. Pure."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ddtree_ops.inventory.models import Target
from ddtree_ops.inventory.yaml_source import suggestion
from ddtree_ops.lint.model import Case, Finding, Rule, Severity, rules_of
from ddtree_ops.lint.runtime import RuntimeFacts

__all__ = ["RULES", "lint", "rules_table"]

_MODULES = tuple(f"ddtree_ops.lint.rules_{topic}" for topic in ("flags", "tree", "service"))
for _module in _MODULES:
    import_module(_module)

RULES: tuple[Rule, ...] = rules_of(*_MODULES)
"""Every rule, in the order in which they look."""

_ORDER = (Severity.ERROR, Severity.WARN, Severity.INFO)


def lint(target: Target, facts: RuntimeFacts) -> tuple[Finding, ...]:
    """What is wrong with a target, errors first; those that the service ignores are ``info`` with its reason.

    :param facts: of the target's runtime; what plugins add (``plugin_flags``) is laid on them here.
    """
    case = Case(target, facts.with_plugins(target.runtime.plugin_flags))
    ignore = target.service.lint.ignore
    found: list[Finding] = []
    for one in RULES:
        for finding in one.findings(case):
            why = ignore.get(one.id)
            found.append(replace(finding, severity=Severity.INFO, ignored=why) if why else finding)
    for name in ignore:
        if all(name != one.id for one in RULES):
            found.append(
                Finding(
                    rule="unknown-rule",
                    severity=Severity.WARN,
                    message=f"there is no rule '{name}'{suggestion(name, [one.id for one in RULES])}",
                    reason="An exception from a rule that does not exist hides nothing.",
                    source="ddtree-ops lint --rules",
                    change="correct it, or remove it",
                    path=case.path("lint", "ignore", name),
                )
            )
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def rules_table() -> str:
    """The rules as a Markdown table, as the documentation has it."""
    rows = [f"| `{one.id}` | {one.severity} | {one.title} | {one.source} |" for one in RULES]
    return "\n".join(["| rule | severity | looks for | rests on |", "|---|---|---|---|", *rows]) + "\n"
