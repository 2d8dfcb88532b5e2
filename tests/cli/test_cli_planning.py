"""``plan``, ``apply``, ``status``, ``drift`` as they are typed. No host is reached: nothing listens where they point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
defaults:
  host: {ssh: {user: root, port: 1, known_hosts: /dev/null, connect_timeout: 2s}}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001}
  b: {unit: b.service, runtime: r, venv: /v, model: /m, port: 3002}
hosts:
  one: {address: 127.0.0.1, services: {a: {}}}
  two: {address: 127.0.0.1, services: {a: {}, b: {}}}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed):
    path = tmp_path / "i.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(path))
    return typed


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["plan"], 2, "which host?"),
        (
            ["plan", "one", "--out", "/nonexistent", "--set", "environment.HF_TOKEN=hf_secret1"],
            2,
            "is not written into",
        ),
        (["apply", "/no/such/plan"], 78, "No such file"),
        (["apply", "/etc/hostname"], 78, "is no plan file"),
        (
            ["apply", "/p", "--no-rollback", "--confirm-within", "5m"],
            2,
            "needs the rollback that --no-rollback",
        ),
        (["lock", "break", "one"], 2, "ddtree-ops lock status one; then: ddtree-ops lock break one --yes"),
        (["status", "nowhere"], 2, "no host or group matches"),
        (["drift", "nowhere"], 2, "no host or group matches"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said(command, argv, code, said):
    ended = command(*argv)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert "hf_secret1" not in ended.err


def test_hosts_that_do_not_answer_are_rows_of_the_status(command):
    ended = command("status", "--json")
    assert ended.code == 4
    rows = json.loads(ended.out)["hosts"]
    assert [(row["host"], row["reachable"], row["exit_code"]) for row in rows] == [
        ("one", False, 4),
        ("two/a", False, 4),
        ("two/b", False, 4),
    ]
    text = command("status")
    assert text.code == 4
    assert text.out.count("unreachable") == 3


@pytest.mark.parametrize("name", ["start", "stop", "restart", "rollback", "confirm"])
def test_a_wait_for_the_lock_is_a_duration_everywhere(command, name):
    assert command(name, "one", "--lock-wait", "30m").code == 4
    ended = command(name, "one", "--lock-wait", "soon")
    assert (ended.code, "'soon' is not a duration" in ended.err) == (2, True)


def test_hosts_that_do_not_answer_are_no_drift_and_no_pass(command):
    ended = command("drift", "--json")
    assert ended.code == 4
    found = json.loads(ended.out)
    assert (found["schema"], found["hosts"], len(found["errors"])) == (1, [], 3)


@pytest.mark.parametrize(
    ("argv", "key"),
    [(["plan", "two"], "plans"), (["lock", "status", "two"], "locks"), (["drift", "two"], "hosts")],
)
def test_a_document_is_whole_whatever_hosts_say(command, argv, key):
    ended = command(*argv, "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["schema"], document[key]) == (4, 1, [])
    assert [error.partition(":")[0] for error in document["errors"]] == ["two", "two"]


@pytest.mark.parametrize("name", ["plan", "deploy"])
def test_an_error_keeps_its_code_whatever_is_asked_of_the_exit_code(command, name, tmp_path):
    more = ["--dry-run"] if name == "deploy" else ["--out", str(tmp_path / "p")]
    ended = command(name, "one", "--detailed-exitcode", *more)
    assert ended.code == 4
    assert "one: connect" in ended.err
    assert not (tmp_path / "p").exists()
