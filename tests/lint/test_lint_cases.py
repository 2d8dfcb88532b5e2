"""Golden cases: ``cases/RULE.yaml``, a list of changes to a clean target and everything that is then found."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree_ops.lint import RULES, RuntimeFacts, lint
from ddtree_ops.lint.model import Case, Severity

CASES = Path(__file__).parent / "cases"
KEYS = {"name", "facts", "service", "host", "runtime", "finds", "where", "message", "change", "hidden"}


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def cases() -> list[Any]:
    """Read once, and by libyaml where it is: each worker reads them before its first test."""
    return [
        pytest.param(file.stem, case, id=f"{file.stem}: {case['name']}")
        for file in sorted(CASES.glob("*.yaml"))
        for case in yaml.load(file.read_text("utf-8"), LOADER)
    ]


@pytest.mark.parametrize(("rule", "case"), cases())
def test_case(rule: str, case: dict[str, Any], facts: dict[str, RuntimeFacts], make_target):
    assert set(case) <= KEYS
    found = lint(make_target(case), facts[case.get("facts", "patched")])
    assert sorted(f"{one.severity} {one.rule}" for one in found) == sorted(case["finds"])
    mine = [one for one in found if one.rule == rule]
    if not mine:
        assert not {"where", "message", "change"} & set(case)
        return
    assert all(one.reason and one.source and one.change for one in mine)
    assert case.get("where", mine[0].where) == mine[0].where
    assert case.get("message", "") in mine[0].message
    assert case.get("change", "") in mine[0].change
    if "hidden" in case:
        assert case["hidden"] not in repr([one.to_json() for one in found])


@pytest.mark.parametrize("rule", [one.id for one in RULES])
def test_every_rule_has_a_case_that_it_finds_and_one_that_looks_alike(rule: str):
    of_rule = yaml.safe_load((CASES / f"{rule}.yaml").read_text("utf-8"))
    hits = [any(word.split()[1] == rule for word in case["finds"]) for case in of_rule]
    assert True in hits and False in hits


def test_every_case_belongs_to_a_rule():
    assert {file.stem for file in CASES.iterdir()} == {one.id for one in RULES}


class Refused(Exception):
    pass


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(message)


PARSERS: dict[str, Strict] = {}
"""By runtime and the flags of its plug-ins: they have some four hundred flags each."""
REFUSED_BY_ARGPARSE = {
    "unknown-flag",
    "foreign-flag",
    "ambiguous-flag",
    "flag-value",
    "flag-choice",
    "algorithm",
}


@pytest.mark.parametrize(("rule", "case"), cases())
def test_argparse_refuses_exactly_what_these_rules_refuse(
    rule: str, case: dict[str, Any], facts: dict[str, RuntimeFacts], make_target
):
    """The same command line through a parser made of the runtime's flags."""
    target, known = make_target(case), facts[case.get("facts", "patched")]
    if known.flags is None:
        pytest.skip("there are no flags to make a parser of")
    seen = Case(target, known.with_plugins(target.runtime.plugin_flags))
    assert seen.facts.flags is not None
    key = f"{case.get('facts', 'patched')} {target.runtime.plugin_flags}"
    if (parser := PARSERS.get(key)) is None:
        parser = PARSERS[key] = Strict()
        seen.facts.flags.add_to(parser)
    words = [word for given in seen.given for word in (f"--{given.key}", *given.words)]
    refusing = {
        one.rule for one in lint(target, known) if one.severity is Severity.ERROR
    } & REFUSED_BY_ARGPARSE
    try:
        parser.parse_args(words)
    except Refused as error:
        assert refusing, f"argparse: {error}"
    else:
        assert not refusing
