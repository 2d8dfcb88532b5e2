"""Golden cases: ``cases/NAME.yaml`` and beside it ``NAME.txt`` (every problem) or ``NAME.json`` (the steps)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree_ops.errors import ConfigError, ExitCode
from ddtree_ops.playbook import Playbook, load_playbook

CASES = Path(__file__).parent / "cases"
FILES = sorted(CASES.glob("*.yaml"))


def _meaning(playbook: Playbook) -> object:
    return {
        "name": playbook.name,
        "description": playbook.description,
        "steps": [{step.kind: step.arguments} for step in playbook.steps],
        "on_failure": [{step.kind: step.arguments} for step in playbook.on_failure],
    }


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_case(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES)
    monkeypatch.setenv("CASE_SET", "set")
    meaning, problems = file.with_suffix(".json"), file.with_suffix(".txt")
    assert meaning.exists() != problems.exists(), "a case has either steps or problems"
    if meaning.exists():
        assert json.loads(json.dumps(_meaning(load_playbook(file.name)))) == json.loads(
            meaning.read_text("utf-8")
        )
        return
    with pytest.raises(ConfigError) as caught:
        load_playbook(file.name)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert "\n".join(caught.value.details) + "\n" == problems.read_text("utf-8")


def test_every_expectation_has_its_case() -> None:
    assert FILES
    assert {path.stem for path in CASES.iterdir()} == {path.stem for path in FILES}
