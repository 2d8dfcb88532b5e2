"""The examples for GitHub Actions and systemd hold what they are to hold, and systemd takes them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ddtree_ops import paths
from ddtree_ops.cli.app import app
from ddtree_ops.playbook import load_playbook
from ddtree_ops.service.unitfile import settings

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def _parses(words: list[str]) -> bool:
    """The words after ``ddtree-ops`` are a command that there is, with options that there are."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("ddtree-ops", list(words))
    name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return name == "nightly" and command.make_context(name, rest, parent=context) is not None


def test_the_shipped_playbook_changes_nothing_unless_asked() -> None:
    playbook = load_playbook(str(paths.shipped("playbooks") / "nightly.yaml"))
    steps = {step.kind: step.arguments for step in playbook.steps}
    assert list(steps) == ["doctor", "drift", "deploy", "validate", "bench", "journal", "trend"]
    assert steps["deploy"]["when"] == steps["bench"]["when"] == "asked"
    assert playbook.reports


def test_the_workflow() -> None:
    text = (EXAMPLES / "nightly.github.yml").read_text()
    workflow = yaml.safe_load(text)
    job = workflow["jobs"]["nightly"]
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"] == {"group": "nightly", "cancel-in-progress": False}
    assert workflow[True]["schedule"]  # YAML 1.1 reads "on" as a boolean, and GitHub does not
    assert "self-hosted" in job["runs-on"]
    steps = {str(step.get("uses", step.get("name"))).partition("@")[0]: step for step in job["steps"]}
    assert steps["actions/checkout"]["with"]["persist-credentials"] is False
    assert steps["actions/upload-artifact"]["if"] == "always()"
    assert steps["actions/upload-artifact"]["with"]["if-no-files-found"] == "error"
    script = steps["Nightly"]["run"]
    assert "${{" not in "".join(str(step.get("run", "")) for step in job["steps"])
    line = next(part for part in script.replace("\\\n", "").splitlines() if "ddtree-ops -i" in part)
    given = {"$DEPLOY": ["--deploy"], "$BENCH": ["--no-bench"], "${webhook[@]}": ["--webhook-env", "X"]}
    words = [word for part in shlex.split(line) for word in given.get(part, [part])]
    assert _parses(words[1:])


def test_the_service_and_its_timer(tmp_path: Path) -> None:
    service = (EXAMPLES / "ddtree-ops-nightly.service").read_text()
    found = {(section, key): value for section, key, value in settings(service)}
    program, *words = shlex.split(found["Service", "ExecStart"])
    assert program.endswith("/ddtree-ops")
    assert _parses(words)
    assert found["Service", "LoadCredential"].partition(":")[0] == "webhook"
    assert "${CREDENTIALS_DIRECTORY}/webhook" in words
    timer = (EXAMPLES / "ddtree-ops-nightly.timer").read_text()
    when = {(section, key): value for section, key, value in settings(timer)}
    assert when["Timer", "Persistent"] == "yes"
    assert when["Timer", "RandomizedDelaySec"]
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    paths = []
    for name, text in (("service", service), ("timer", timer)):
        paths.append(tmp_path / f"ddtree-ops-nightly.{name}")
        paths[-1].write_text(text.replace(program, sys.executable))
    done = subprocess.run(
        [analyze, "verify", "--man=no", *map(str, paths)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if "ddtree-ops-nightly" in line]) == (
        0,
        [],
    )
