"""Shipped playbooks, finding, settings from the command line, the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from ddtree_ops import paths
from ddtree_ops.errors import ConfigError, UsageError
from ddtree_ops.playbook import load_playbook, playbook_schema
from ddtree_ops.playbook.models import FAILURE_STEPS, STEPS, Plain, PlainKind


def test_every_step_has_a_model() -> None:
    plain = {kind for kind, model in STEPS.items() if model is Plain}
    assert plain == set(get_args(PlainKind))
    assert set(FAILURE_STEPS) < set(STEPS)


def test_deploy() -> None:
    playbook = load_playbook(str(paths.shipped("playbooks") / "deploy.yaml"))
    assert playbook.name == "deploy"
    assert [step.kind for step in playbook.steps] == [
        "lint",
        "preflight",
        "build",
        "push",
        "verify",
        "activate",
        "wait",
        "smoke",
        "signatures",
    ]
    assert [step.kind for step in playbook.on_failure] == ["capture", "diagnose", "rollback"]
    assert all(step.arguments == {} for step in (*playbook.steps, *playbook.on_failure))


def test_every_shipped_playbook_is_valid_and_named_after_its_file() -> None:
    files = sorted(paths.shipped("playbooks").glob("*.yaml"))
    assert {"check", "deploy"} <= {file.stem for file in files}
    for file in files:
        playbook = load_playbook(str(file))
        assert playbook.name == file.stem
        assert playbook.description


def test_check_changes_nothing() -> None:
    playbook = load_playbook(str(paths.shipped("playbooks") / "check.yaml"))
    kinds = {step.kind for step in (*playbook.steps, *playbook.on_failure)}
    assert kinds == {"wait", "smoke", "signatures", "capture", "diagnose"}


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert load_playbook("deploy").name == "deploy"
    own = tmp_path / "playbooks/deploy.yaml"
    own.parent.mkdir()
    own.write_text("schema: 1\nname: own\nsteps: [wait]\n")
    assert load_playbook("deploy").name == "own"
    assert load_playbook(own).path == "playbooks/deploy.yaml"
    with pytest.raises(ConfigError) as caught:
        load_playbook("depoly")
    assert caught.value.message == "there is no playbook named depoly (did you mean 'deploy'?)"


def test_settings_from_the_command_line() -> None:
    playbook = load_playbook("deploy")
    changed = playbook.with_arguments(
        {"smoke": {"prompt": "hello", "window": "5s", "max_tokens": None}, "wait": {"load_timeout": 60.0}}
    )
    given = {step.kind: step.arguments for step in changed.steps if step.arguments}
    assert given == {"smoke": {"prompt": "hello", "window": 5.0}, "wait": {"load_timeout": 60.0}}
    again = changed.with_arguments({"smoke": {"max_tokens": 3}})
    assert {step.kind: step.arguments for step in again.steps}["smoke"] == {
        "prompt": "hello",
        "window": 5.0,
        "max_tokens": 3,
    }
    assert playbook.with_arguments({"nothing": {"x": None}}) == playbook


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"smok": {"prompt": "x"}}, "playbook deploy has no step smok (did you mean 'smoke'?)"),
        ({"smoke": {"promt": "x"}}, "step smoke: promt: unknown setting (did you mean 'prompt'?)"),
        ({"smoke": {"max_tokens": 0}}, "step smoke: max_tokens: Input should be greater than or equal to 1"),
        (
            {"wait": {"load_timeout": "soon"}},
            "step wait: load_timeout: 'soon' is not a duration: write seconds or a text such as 90s, 15m, 1h30m",
        ),
    ],
)
def test_wrong_settings_from_the_command_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_playbook("deploy").with_arguments(settings)
    assert str(caught.value) == message


def test_the_schema_knows_every_step() -> None:
    schema = playbook_schema()
    bare, mapping = schema["properties"]["steps"]["items"]["anyOf"]
    assert bare["enum"] == list(mapping["properties"]) == list(STEPS)
    smoke = mapping["properties"]["smoke"]["anyOf"][0]
    assert set(smoke["properties"]) == {"prompt", "max_tokens", "window", "min_accept_length"}
    assert smoke["additionalProperties"] is False
    after = schema["properties"]["on_failure"]["items"]["anyOf"][0]
    assert after["enum"] == list(FAILURE_STEPS)
