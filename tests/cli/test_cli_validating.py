"""``validate`` as it is typed: what is wrong with a command line, lists, a host that is not reached. No host is reached."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.runreport import RunReport

INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
defaults:
  host: {ssh: {user: root, port: 1, known_hosts: /dev/null, connect_timeout: 2s}}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001}
hosts:
  one: {address: 127.0.0.1, services: [a]}
  two: {address: 127.0.0.1, services: [a]}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[..., Any]) -> Callable[..., Any]:
    path = tmp_path / "site.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(path))
    monkeypatch.chdir(tmp_path)
    return typed


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["one", "--check", "prefx-hit"], 2, "did you mean 'prefix-hit'?"),
        (["one", "--suite", "quik"], 2, "did you mean 'quick'?"),
        (["nowhere"], 2, "no host or group matches 'nowhere'"),
        (["one", "--suite", "./nowhere.yaml"], 78, "nowhere.yaml"),
        (["one", "--suite", "wrong.yaml"], 78, "wrong.yaml:3: checks[0]: there is no check 'burts'"),
        (["one", "two", "--record", "golden.json"], 2, "--record is for one target, and 2 are selected"),
        (["one", "--timeout", "soon"], 2, "--timeout"),
    ],
)
def test_what_is_wrong_is_said(
    command: Callable[..., Any], tmp_path: Path, argv: list[str], code: int, said: str
) -> None:
    (tmp_path / "wrong.yaml").write_text("schema: 1\nchecks:\n  - burts\n")
    ended = command("validate", *argv)
    assert (ended.code, said in ended.err, ended.out) == (code, True, ""), ended
    assert "Traceback" not in ended.err


def test_checks_and_suites_are_listed(command: Callable[..., Any]) -> None:
    ended = command("validate", "--list")
    assert ended.code == 0
    assert "prefix-hit    the same prompt again is answered from the cache, and the same (quick" in ended.out
    assert "suite full: " in ended.out
    document = json.loads(command("validate", "--list", "--json").out)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["steady"]["standing"]
    assert checks["burst"]["settings"]["widths"] == [8, 16]
    quick = json.loads(command("validate", "--list", "--suite", "quick", "--json").out)
    assert {"burst", "steady"} <= {check["name"] for check in quick["checks"]} < set(checks)


def test_hosts_that_are_not_reached_are_no_pass(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("validate", "one", "--check", "stop", "--json", "--report-dir", "reports")
    assert ended.code == 4
    report = RunReport.from_json(json.loads(ended.out))
    assert (report.command, report.complete, report.verdict.value) == ("validate", True, "fail")
    assert [target.errors[0].splitlines()[0].startswith("one: connect") for target in report.targets] == [
        True
    ]
    assert json.loads((tmp_path / "reports" / "report.json").read_text())["id"] == report.id
