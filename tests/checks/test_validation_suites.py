"""Suites of checks: what ships, what a wrong file says, and what is picked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddtree_ops.checks.validation.registry import checks
from ddtree_ops.checks.validation.suites import load_suite, pick, suite_names, suite_schema
from ddtree_ops.errors import ConfigError, UsageError

STANDING = ["steady", "memory", "no-xid", "signatures"]


def test_shipped_suites() -> None:
    assert suite_names() == ("quick", "standard", "full")
    suites = {name: load_suite(name) for name in suite_names()}
    sizes = [len(suite.checks) for suite in suites.values()]
    assert sizes == sorted(sizes)
    for name, suite in suites.items():
        assert (suite.name, bool(suite.description)) == (name, True)
    assert not [one.name for one in suites["quick"].checks if one.spec.disturbs]
    known = {name for name, spec in checks().items() if not spec.standing}
    assert known == {one.name for one in suites["full"].checks if not one.spec.standing}, "full holds all"


def test_every_check_says_what_it_proves_and_has_settings_with_defaults() -> None:
    for name, spec in checks().items():
        assert spec.name == name
        assert spec.title
        assert not spec.title.endswith(".")
        assert spec.settings() == spec.settings.model_validate({})
    assert [name for name, spec in checks().items() if spec.standing] == STANDING


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema: 1\nchecks:\n  - burst: {widths: [4], max_tokens: 9}\n  - short-chat\n  - steady:\n"
    )
    suite = load_suite(path)
    assert suite.name == "mine"
    assert [one.name for one in suite.checks] == ["burst", "short-chat", "steady"]
    assert suite.checks[0].settings.model_dump() == {"widths": (4,), "max_tokens": 9, "alone": 8}
    assert [one.name for one in pick([], suite)] == ["burst", "short-chat", *STANDING]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("schema: 2\nchecks: [stop]", 1, "schema"),
        ("schema: 1\nchecks: []", 2, "checks"),
        ("schema: 1\nchecks:\n  - stop\n  - burts", 4, "there is no check 'burts' (did you mean 'burst'?)"),
        ("schema: 1\nchecks:\n  - stop: {end_token: 9}", 3, "did you mean 'end_tokens'"),
        ("schema: 1\nchecks:\n  - burst: {widths: [1]}", 3, "widths"),
        ("schema: 1\nchecks:\n  - burst: 8", 3, "expected a mapping of settings"),
        ("schema: 1\nchecks:\n  - garbage: {prompts: [quiksort]}", 3, "there is no prompt 'quiksort'"),
        ("schema: 1\nchecks:\n  - stop\n  - stop", 4, "stands here twice"),
        ("schema: 1\nchecks:\n  - [stop]", 3, "no check; write"),
        (
            "schema: 1\nchecks:\n  - stop:\n    burst:",
            3,
            "more than one key: begin each check with its own dash",
        ),
        ("schema: 1\nsteps: [stop]", 1, "checks"),
    ],
)
def test_a_wrong_suite_names_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_suite(path)
    assert any(f"wrong.yaml:{line}:" in each and words in each for each in caught.value.details), (
        caught.value.details
    )
    assert "validate --list" in caught.value.hint


def test_names_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"no check named prefx-hit \(did you mean 'prefix-hit'\?\)"):
        pick(["prefx-hit"])
    with pytest.raises(UsageError, match=r"no suite named quik \(did you mean 'quick'\?\)"):
        load_suite("quik")
    with pytest.raises(UsageError, match="no check to run"):
        pick([])
    with pytest.raises(ConfigError):
        load_suite("./nowhere.yaml")


def test_picked_checks_take_the_settings_of_the_suite() -> None:
    own = {one.name: one for one in pick(["burst", "steady", "burst"], load_suite("quick"))}
    assert list(own) == ["burst", *STANDING]
    assert own["burst"].settings.model_dump()["widths"] == (8,)
    alone = {one.name: one for one in pick(["burst"])}
    assert alone["burst"].settings.model_dump()["widths"] == (8, 16)


def test_schema_for_editors() -> None:
    schema = suite_schema()
    kinds = schema["properties"]["checks"]["items"]["anyOf"][0]["enum"]
    assert kinds == list(checks())


def test_the_page_names_every_check_and_setting(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "validation.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` (\|.*)$", page, re.M))
    elsewhere = {"acceptance", "lossless"}
    for name, spec in checks().items():
        if name not in elsewhere:
            named = re.findall(r"`(\w+)`", rows[name].split("|")[-2])
            assert sorted(named) == sorted(spec.settings.model_fields), name
    (text,) = re.findall(r"^```\n(schema: 1\n.*?)^```$", page, re.M | re.S)
    path = tmp_path / "release.yaml"
    path.write_text(text)
    assert load_suite(path).name == "release"
