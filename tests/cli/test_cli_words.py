"""What commands say: help for people, next commands that can be typed, lengths of time, the same command again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import ddtree_ops
from ddtree_ops.cli import deploying, planning
from ddtree_ops.cli.app import app
from ddtree_ops.cli.common import same_again
from ddtree_ops.cli.helping import unwrapped
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.inventory.yaml_source import suggestion
from ddtree_ops.remote import connect_local

PACKAGE = Path(ddtree_ops.__file__).parent
COMMAND = re.compile(r"ddtree-ops ((?:[^\s;,()`']+|'[^']*')(?: (?:[^\s;,()`']+|'[^']*'))*)")
NO_COMMAND = (
    "lab host",
    "lab engine",
    "plan$",
    "inventory$",
    "playbook$",
    "lab$",
    "lock$",
    "sets it",
    "-i {}$",
    "{}",
    "(?",
)
"""Beginnings of what stands after ``ddtree-ops`` and is no command: titles, a kind of file, patterns."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


WITHOUT = {("lab", "up"), ("lab", "down"), ("inventory", "show")}
"""Commands that are told without a name on purpose: they stand for all there is."""

KNOWN = dict(commands(typer.main.get_command(app)))


def texts() -> Iterator[tuple[str, str]]:
    """Every text of the package that is no docstring and no help, with where it stands; ``{}`` for what is filled in."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        left_out = set()
        for node in ast.walk(tree):
            inner = node.value if isinstance(node, ast.Expr) else None
            if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
                inner = node.value
            left_out |= (
                {id(each) for each in ast.walk(inner)} if inner and not isinstance(inner, ast.Call) else set()
            )
        for node in ast.walk(tree):
            text = text_of(node) if id(node) not in left_out else None
            if text is not None:
                left_out |= {id(each) for each in ast.walk(node)}
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def text_of(node: Any) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def next_commands() -> Iterator[tuple[str, str]]:
    for where, text in texts():
        for match in COMMAND.finditer(text):
            words = match[1].removeprefix("-i lab ").removeprefix("-i {} ")
            if not any(re.match(re.escape(each).replace(r"\$", "$"), words) for each in NO_COMMAND):
                yield where, words


def fault_of(text: str) -> str:
    """Why somebody could not type this; empty: they can."""
    words = text.split()
    path = next((tuple(words[:size]) for size in (2, 1) if tuple(words[:size]) in KNOWN), None)
    if path is None:
        return "no such command"
    command, rest = KNOWN[path], words[len(path) :]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in rest:
        if word.startswith("-") and word != "-" and word.split("=")[0] not in options:
            return f"it has no {word}"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    given = bool(rest) and (rest[0] == "-" or not rest[0].startswith("-"))
    if arguments and path not in WITHOUT and not given and not {"-i", "--list", "--rules"} & set(rest):
        return f"without {arguments[0].name}"
    return ""


def test_every_command_that_is_told_to_be_typed_can_be_typed():
    told = list(next_commands())
    assert len(told) > 70
    faults = [f"{where}: ddtree-ops {words}: {fault}" for where, words in told if (fault := fault_of(words))]
    assert faults == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("deploy", "without hosts"),
        ("deploy {} --dry-run", ""),
        ("deploy writes it", ""),
        ("router logs {} --grep x", ""),
        ("router deploy", "without name"),
        ("runtime build", "without runtime"),
        ("logs {} --lins 3", "it has no --lins"),
        ("nope {}", "no such command"),
    ],
)
def test_the_check_itself(text, fault):
    assert fault_of(text) == fault


@pytest.mark.parametrize("path", KNOWN, ids=" ".join)
def test_help_speaks_to_people(path):
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0
    assert re.findall(r"<[a-z\[\]]+>", shown.output) == []


def test_help_is_folded_by_the_terminal():
    assert unwrapped("One line.\n\nA long\n  paragraph.\n\nEnd.") == "One line.\n\nA long paragraph.\n\nEnd."


class TestLengthsOfTime:
    @pytest.mark.parametrize(
        "argv",
        [
            ("stop", "--drain"),
            ("restart", "--drain"),
            ("start", "--timeout"),
            ("wait", "--timeout"),
            ("stop", "--lock-wait"),
            ("rollback", "--lock-wait"),
            ("smoke", "--window"),
            ("status", "--interval"),
            ("deploy", "--confirm-within"),
        ],
        ids=" ".join,
    )
    def test_all_are_written_alike(self, argv):
        name, option = argv
        (param,) = [each for each in KNOWN[(name,)].params if option in each.opts]
        assert param.metavar == "DURATION"
        for text, seconds in (("90", 90.0), ("90s", 90.0), ("30m", 1800.0)):
            assert KNOWN[(name,)].make_context(name, [option, text]).params[param.name] == seconds

    def test_what_is_none_is_a_usage_error(self):
        ended = CliRunner().invoke(app, ["stop", "--drain", "soon"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert (ended.exit_code, "'soon' is not a duration" in ended.output) == (2, True)


class TestTheSameCommandAgain:
    def test_what_was_typed_is_repeated(self):
        again = same_again("deploy", service="k26", runtime=None, set=["a.b=1", "c='x y'"], no_rollback=True)
        assert Safety(again=again).same_again("ct200") == (
            "ddtree-ops deploy ct200 --service k26 --set a.b=1 --set 'c='\"'\"'x y'\"'\"'' --no-rollback"
        )

    def test_a_secret_is_not(self):
        again = same_again("deploy", set=["environment.HF_TOKEN=hf_abcdefghijklmnop", "port=1"])
        assert "hf_abc" not in again
        assert "--set environment.HF_TOKEN=VALUE-NOT-SHOWN --set port=1" in again

    def test_without_options_it_is_the_command(self):
        assert Safety(command="start").same_again("b300") == "ddtree-ops start b300"

    @pytest.mark.parametrize("command", [("deploy",), ("run", "deploy")])
    def test_what_lint_refuses_is_linted_with_the_settings_that_were_given(self, monkeypatch, typed, command):
        played = []
        monkeypatch.setattr(deploying, "play", lambda *given, safety, **more: played.append(safety))
        options = ("--runtime", "sglang-0.5.11-ddtree", "--set", "args.log-level=error")
        ended = typed("-i", "lab", *command, "ct200", *options)
        assert ended.code == 0, ended.err
        (safety,) = played
        assert safety.lint_of("ct200") == f"ddtree-ops lint ct200 {' '.join(options)}"

    def test_a_saved_plan_that_lint_refuses_is_linted_with_its_settings(self, monkeypatch, typed):
        played = []
        settings = ("args.log-level=error",)
        saved = SimpleNamespace(
            hosts=("ct200",),
            inventory="lab",
            runtime=None,
            settings=settings,
            match=lambda targets: (targets, {}),
        )
        monkeypatch.setattr("ddtree_ops.deploy.saved.read_plan", lambda path: saved)
        monkeypatch.setattr(planning, "play", lambda *given, safety, **more: played.append(safety))
        ended = typed("apply", "change.json")
        assert ended.code == 0, ended.err
        assert (
            played[0].lint_of("ct200") == "ddtree-ops lint ct200 --inventory lab --set args.log-level=error"
        )

    def test_without_options_lint_is_asked_of_what_the_inventory_says(self):
        assert Safety().lint_of("b300") == "ddtree-ops lint b300"


def test_an_inventory_that_is_not_there_is_not_said_to_be_a_variable_of_yours(monkeypatch, typed):
    monkeypatch.delenv("DDTREE_OPS_INVENTORY", raising=False)
    monkeypatch.setenv("_DDTREE_OPS_INVENTORY_BY_OPTION", "")
    ended = typed("-i", "labb", "lint")
    monkeypatch.delenv("DDTREE_OPS_INVENTORY", raising=False)
    assert (ended.code, "DDTREE_OPS_INVENTORY is" in ended.err) == (78, False)
    assert "did you mean 'lab'" in ended.err


def test_a_rollback_to_next_to_nothing_is_a_usage_error(typed):
    ended = typed("-i", "lab", "rollback", "ct200", "--to", "zz")
    assert (ended.code, "too short to name anything" in ended.err) == (2, True)


def test_what_several_hosts_have_in_common_is_linted_once(typed, tmp_path):
    text = (
        (PACKAGE.parent / "inventories/lab.yaml").read_text().replace("attention-backend: triton", "x-no: 1")
    )
    path = tmp_path / "two.yaml"
    path.write_text(text)
    ended = typed("lint", "-i", str(path))
    heads = [line for line in ended.out.splitlines() if "  default-backend  " in line]
    assert len(heads) == 1 and heads[0].startswith("ct200, b300"), ended.out
    assert "describe hosts.NAME.gpu" in ended.out and "lint: 2 targets" in ended.out


@pytest.mark.parametrize(
    ("word", "said"),
    [("gpu1", " (did you mean 'gpu01' or 'gpu11'?)"), ("gpu011", " (did you mean 'gpu01' or 'gpu11'?)")],
)
def test_words_equally_near_are_all_named(word, said):
    assert suggestion(word, ["gpu01", "gpu11", "b300"]) == said


def test_patch_check_of_a_host_where_nothing_is_deployed_says_so(monkeypatch, typed, tmp_path):
    text = (PACKAGE.parent / "inventories/lab.yaml").read_text()
    path = tmp_path / "lab.yaml"
    path.write_text(text.replace("deploy_root: ", f"deploy_root: {tmp_path}/none # "))
    monkeypatch.setattr("ddtree_ops.cli.common.open_session", lambda target: connect_local("ct200"))
    ended = typed("patch", "check", "ct200", "-i", str(path))
    assert ended.code == 8, ended.err
    assert (
        "nothing deployed" in ended.err and "next:  ddtree-ops" in ended.err and "deploy ct200" in ended.err
    )
