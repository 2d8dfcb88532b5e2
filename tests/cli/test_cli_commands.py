"""Commands as they are typed: exit codes, where errors go, JSON that parses. No host is reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CRASH = "RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0\n"
INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
defaults:
  host: {ssh: {user: root, port: 1, known_hosts: /dev/null, connect_timeout: 2s}}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001, environment: {HF_TOKEN: hf_secret, LAB_TOKENS: "7"}}
  b: {unit: b.service, runtime: r, venv: /v, model: /m, port: 3002}
hosts:
  one: {address: 127.0.0.1, services: {a: {}}, gpu: {name: "[red]X[/]", count: 8, arch: sm120}}
  two: {address: 127.0.0.1, services: {a: {}, b: {}}}
groups:
  all-of-them: [one, two]
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "lab two.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(path))
    return path


@pytest.fixture
def command(inventory, typed):
    return typed


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["frob"], 2, "No such command"),
        (["deploy", "one", "--frob"], 2, "No such option"),
        (["deploy"], 2, "which host?"),
        (["deploy", "nowhere"], 2, "no host or group matches 'nowhere'"),
        (["deploy", "one", "--set", "port"], 2, "write KEY=VALUE"),
        (["deploy", "one", "--set", "port=99999"], 2, "at most 65535"),
        (["deploy", "one", "--set", "prot=1"], 2, "port"),
        (["deploy", "one", "--set", "environment.PYTHONPATH=/x"], 2, "PYTHONPATH"),
        (["deploy", "one", "--runtime", "other"], 2, "no runtime 'other'"),
        (["deploy", "two", "--service", "c"], 2, "no service 'c'"),
        (["run", "nothing", "one"], 78, "nothing"),
        (["-i", "nowhere", "inventory", "show"], 78, "nowhere"),
        (["inventory", "show", "-i", "nowhere"], 78, "nowhere"),
        (["playbook", "validate", "nowhere"], 78, "nowhere"),
        (["runtime", "show", "other"], 2, "no runtime 'other'"),
        (["patch", "check", "two"], 2, "names 2 services: two/a, two/b"),
        (["logs", "one", "--follow", "--until", "2h"], 2, "--until is in the past"),
        (["logs", "one", "--follow", "--grep", "("], 2, "not a regular expression"),
        (["smoke", "one", "--max-tokens", "1"], 2, "max-tokens"),
        (["diagnose", "no-such.log"], 2, "no-such.log"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_said_on_standard_error(command, argv, code, said):
    ended = command(*argv)
    assert ended.code == code
    assert said in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", ["deploy", "run", "smoke", "logs", "diagnose", "inventory", "patch", "lab"])
def test_every_command_has_help(command, name):
    assert command(name, "--help").code == 0


def test_the_plan_of_several_hosts_of_which_none_answers_names_each(command):
    ended = command("deploy", "all-of-them", "--dry-run", "--json")
    assert ended.code == 4
    document = json.loads(ended.out)
    assert (document["schema"], document["plans"], len(document["errors"])) == (1, [], 3)
    assert ended.err.count("error: one: connect: ") == 1
    assert ended.err.count("error: two: connect: ") == 2, "one a service"


def test_a_deploy_to_hosts_that_do_not_answer_is_one_json_document(command):
    ended = command("deploy", "all-of-them", "--json")
    assert ended.code == 4
    results = json.loads(ended.out)
    assert [(item["host"], item["outcome"], item["exit_code"]) for item in results] == [
        ("one", "failed", 4),
        ("two/a", "failed", 4),
        ("two/b", "failed", 4),
    ]
    assert "state: nothing was changed" in results[0]["error"]
    assert "one connect: FAILED" in ended.err


@pytest.mark.parametrize(
    ("argv", "document"),
    [
        (["smoke", "one", "--json"], {"schema": 1, "checks": [], "diagnoses": []}),
        (["diagnose", "one", "--json"], {"schema": 1, "verdict": "inconclusive", "diagnoses": []}),
    ],
)
def test_looking_at_a_host_that_does_not_answer_is_no_pass(command, argv, document):
    ended = command(*argv)
    assert ended.code == 4
    found = json.loads(ended.out)
    assert len(found.pop("errors")) == 1
    assert {name: found[name] for name in document} == document


def test_secrets_of_an_inventory_are_not_shown(command):
    ended = command("inventory", "show", "--json")
    assert ended.code == 0
    assert "hf_secret" not in ended.out
    environment = json.loads(ended.out)["hosts"]["one"]["services"]["a"]["environment"]
    assert environment == {"HF_TOKEN": "********", "LAB_TOKENS": "7"}
    assert "hf_secret" not in command("inventory", "show").out


def test_names_are_shown_as_written(command):
    assert "8x [red]X[/] (sm120" in command("inventory", "show", "one").out


def test_a_log_file_is_explained(command, tmp_path):
    log = tmp_path / "crash.log"
    log.write_text(CRASH)
    ended = command("diagnose", str(log), "--json")
    assert ended.code == 5
    report = json.loads(ended.out)
    assert report["source"] == str(log)
    assert report["diagnoses"][0]["signature"] == "ddtree-graph-size"


def test_an_empty_log_is_inconclusive(command, tmp_path):
    log = tmp_path / "empty.log"
    log.write_text("")
    assert command("diagnose", str(log)).code == 8


def _process(*argv: str, stdout: int, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddtree_ops", *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["deploy", "all-of-them"], 4),
        (["deploy", "all-of-them", "--json"], 4),
        (["inventory", "show"], 0),
        (["inventory", "schema"], 0),
    ],
)
def test_a_reader_that_has_gone_changes_neither_the_work_nor_its_exit_code(inventory, argv, code):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = _process(*argv, stdout=writing)
    finally:
        os.close(writing)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_a_terminal_that_knows_only_ascii_is_no_reason_to_die(inventory, tmp_path):
    playbook = tmp_path / "p.yaml"
    playbook.write_text("schema: 1\nname: p\ndescription: wärmt auf ✓\nsteps: [wait]\n", encoding="utf-8")
    ended = _process("playbook", "show", str(playbook), stdout=subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert ended.returncode == 0
    assert "p: w?rmt auf ?" in ended.stdout


def test_a_misspelt_prompt_of_the_service_is_found_before_anything_is_touched(tmp_path: Path):
    """Through a playbook that would restart: refused while the unit is as it was."""
    from ddtree_ops.inventory import load_inventory, select
    from ddtree_ops.playbook.load import load_playbook
    from ddtree_ops.playbook.run import run_playbook
    from ddtree_ops.remote import connect_local

    (target,) = select(load_inventory("lab"), ["ct200"])
    health = target.service.health.model_copy(update={"prompt": "quiksort"})
    target = target.model_copy(update={"service": target.service.model_copy(update={"health": health})})
    path = tmp_path / "again.yaml"
    path.write_text("schema: 1\nsteps: [restart, wait, smoke]\n", encoding="utf-8")
    (result,) = run_playbook(
        load_playbook(path), [target], connect=lambda _: connect_local("ct200"), report=lambda _: None
    )
    assert result.error is not None
    assert result.error.exit_code == 2
    assert "quicksort" in result.error.render()
    assert result.error.state == "nothing was changed"
    assert result.seconds == {}


def test_help_and_completion_import_nothing_heavy():
    code = (
        "import sys; from ddtree_ops.cli.app import app; app(['deploy', '--help'], standalone_mode=False); "
    )
    code += "print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--canary" in done.stdout
    imported = set(done.stdout.splitlines()[-1].split())
    heavy = {
        "asyncio",
        "fabric",
        "httpx",
        "packaging",
        "paramiko",
        "ssl",
        "yaml",
        "ddtree_ops.inventory.models",
    }
    assert not heavy & imported


@pytest.mark.parametrize("word", ["/nope", "./nope", "nope.whl"])
@pytest.mark.parametrize("command", [("diagnose",), ("patch", "check"), ("runtime", "verify")])
def test_a_path_that_is_not_there_is_not_taken_for_a_host(commands, command: tuple[str, ...], word: str):
    done = commands.run([*command, word])
    if command == ("diagnose",) and word.endswith(".whl"):
        assert done.returncode == 2
    assert done.returncode != 0
    assert "host or group" not in done.stderr and "no runtime" not in done.stderr
    assert "no such file or directory" in done.stderr.lower()
