"""Golden cases: ``cases/NAME.yaml`` and beside it ``NAME.txt`` (every problem) or ``NAME.json`` (what it means)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.inventory import load_inventory
from ddtree_ops.inventory import yaml_source as source

CASES = Path(__file__).parent / "cases"
FILES = sorted(CASES.glob("*.yaml"))


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES)
    monkeypatch.setenv("CASE_SET", "set")
    monkeypatch.setenv("CASE_EMPTY", "")
    monkeypatch.setenv("DDTREE_OPS_LAB_DIR", "/lab")
    monkeypatch.setenv("HOME", "/home/someone")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_case(file: Path) -> None:
    meaning, problems = file.with_suffix(".json"), file.with_suffix(".txt")
    assert meaning.exists() != problems.exists(), "a case has either a meaning or problems"
    if meaning.exists():
        inventory = load_inventory(file.name)
        assert inventory.model_dump(mode="json", exclude_defaults=True) == json.loads(
            meaning.read_text("utf-8")
        )
        return
    with pytest.raises(ConfigError) as caught:
        load_inventory(file.name)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert "\n".join(caught.value.details) + "\n" == problems.read_text("utf-8")
    assert caught.value.hint == f"ddtree-ops inventory validate -i {file.name}"


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_case_without_libyaml(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pure parser finds the same, but for the words of a syntax error."""
    monkeypatch.setattr(source, "_LOADER", yaml.SafeLoader)
    try:
        load_inventory(file.name)
    except ConfigError as error:
        expected = file.with_suffix(".txt").read_text("utf-8")
        if "is not valid YAML" not in error.message:
            assert "\n".join(error.details) + "\n" == expected
        else:
            assert [line.split(":")[0] for line in error.details] == [file.name]
    else:
        assert file.with_suffix(".json").exists()


def test_every_expectation_has_its_case() -> None:
    assert FILES
    assert {path.stem for path in CASES.iterdir()} == {path.stem for path in FILES}
