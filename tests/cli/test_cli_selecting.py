"""Options that many commands share: which hosts, and in what order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

from ddtree_ops.cli.app import app
from ddtree_ops.report.typed import remember_inventory, typed

ROOT = Path(__file__).resolve().parents[2]


def _commands(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, child in command.commands.items():
            yield from _commands(child, *names, name)
    else:
        yield " ".join(names), command


COMMANDS = dict(_commands(typer.main.get_command(app)))
TAKES_HOSTS = sorted(
    name for name, command in COMMANDS.items() if any(param.name == "hosts" for param in command.params)
)


def test_hints_name_the_inventory_in_every_command_that_takes_one() -> None:
    remember_inventory("mine")
    takes = {
        name
        for name, command in COMMANDS.items()
        if any(param.name == "inventory" for param in command.params)
    }
    assert {
        name for name in takes if typed(f"ddtree-ops {name} x") != f"ddtree-ops -i mine {name} x"
    } == set()


def test_most_commands_take_hosts() -> None:
    assert {"deploy", "run", "smoke", "logs", "inventory show"} <= set(TAKES_HOSTS)


@pytest.mark.parametrize("name", [*TAKES_HOSTS, "diagnose"])
def test_every_command_that_takes_hosts_can_narrow_them(name: str) -> None:
    options = {option for param in COMMANDS[name].params for option in param.opts}
    assert {"--limit", "-l", "--exclude", "-x"} <= options


@pytest.mark.parametrize("name", ["apply", "deploy", "run"])
def test_what_plays_a_playbook_can_go_in_batches(name: str) -> None:
    options = {option for param in COMMANDS[name].params for option in param.opts}
    assert {"--serial", "--canary", "--max-fail", "--parallel"} <= options


def test_no_command_uses_a_short_option_twice() -> None:
    for name, command in COMMANDS.items():
        options = [
            option for param in command.params if isinstance(param, click.Option) for option in param.opts
        ]
        assert len(options) == len(set(options)), name


def _shown(*words: str) -> list[str]:
    argv = ["inventory", "show", "-i", str(ROOT / "inventories/lab.yaml"), "--json", *words]
    done = CliRunner().invoke(app, argv, catch_exceptions=False)
    return list(json.loads(done.stdout)["hosts"])


def test_the_options_narrow_what_was_selected_and_are_forgotten_afterwards() -> None:
    everything = _shown()
    assert {"ct200", "b300"} <= set(everything)
    assert _shown("--limit", "ct*") == ["ct200"]
    assert _shown("k26", "-x", "ct200") == ["b300"]
    assert _shown("all,!ct200", "-l", "k26") == ["b300"]
    assert _shown() == everything


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--serial", "x"), "--serial x: write a number of hosts or a part of them"),
        (("--serial", "0"), "--serial 0: at least 1"),
        (("--max-fail", "200%"), "--max-fail 200%: more than all of them"),
    ],
)
def test_a_wrong_size_is_told_before_anything_is_connected(words: tuple[str, ...], message: str) -> None:
    from ddtree_ops.errors import UsageError

    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(
            app, ["deploy", "ct200", "-i", str(ROOT / "inventories/lab.yaml"), *words], catch_exceptions=False
        )
