"""Unit states: parsing, what is running and what is not, the words for people."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.remote import agent
from ddtree_ops.service.state import PROPERTIES, UnitState, parse_show, parse_span

RUNNING = """\
MainPID=1107
ExecMainPID=1107
Result=success
NRestarts=0
ExecMainStartTimestamp=Sun 2026-11-29 14:53:41 UTC
ExecMainCode=0
ExecMainStatus=0
ControlGroup=/system.slice/sglang-tiny.service
MemoryCurrent=18446744073709551615
TasksCurrent=35
Id=sglang-tiny.service
LoadState=loaded
ActiveState=active
SubState=running
FragmentPath=/etc/systemd/system/sglang-tiny.service
DropInPaths=/etc/systemd/system/sglang-tiny.service.d/a.conf /run/b.conf
UnitFileState=enabled
NeedDaemonReload=no
InvocationID=8a5e0b1f3b7d4a5d9b1b6cb2f1b1d3c1
ActiveEnterTimestamp=Sun 2026-11-29 14:53:41 UTC
InactiveEnterTimestamp=
StateChangeTimestamp=Sun 2026-11-29 15:53:41 CET
"""


def state(**more: str) -> UnitState:
    return UnitState.parse(parse_show(RUNNING) | more)


def ended(**more: str) -> UnitState:
    return state(**{"ActiveState": "failed", "SubState": "failed", "MainPID": "0"} | more)


def test_parse() -> None:
    sample = state()
    assert sample.running and sample.exists and sample.loaded and not sample.failed
    assert (sample.main_pid, sample.exec_main_pid, sample.n_restarts, sample.job) == (1107, 1107, 0, None)
    assert sample.exec_main_start == datetime(2026, 11, 29, 14, 53, 41, tzinfo=UTC)
    assert sample.state_change is None, "a zone other than UTC is not guessed"
    assert sample.inactive_enter is None
    assert sample.memory_current is None and sample.tasks_current == 35
    assert sample.drop_in_paths == ("/etc/systemd/system/sglang-tiny.service.d/a.conf", "/run/b.conf")
    assert state(ActiveEnterTimestamp="@1795964021").active_enter == datetime(
        2026, 11, 29, 14, 53, 41, tzinfo=UTC
    )
    assert state(Job="256").job == 256


def test_the_agent_asks_for_the_same_properties() -> None:
    assert agent.PROPERTIES == PROPERTIES
    assert len(set(PROPERTIES)) == len(PROPERTIES)


def test_no_answer_is_an_error() -> None:
    for text in ("", "Id=x.service\n", "Failed to connect to bus\n"):
        with pytest.raises(ValueError, match="LoadState"):
            UnitState.parse(parse_show(text))


def test_a_line_without_a_name_continues_the_value() -> None:
    assert parse_show("DropInPaths=a\nb c\nId=x=y\n") == {"DropInPaths": "a\nb c", "Id": "x=y"}


def test_missing_unit() -> None:
    sample = UnitState.parse(
        {"Id": "x.service", "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}
    )
    assert not sample.exists and not sample.running
    assert sample.describe() == "x.service does not exist on this host"


def test_auto_restart_is_not_starting() -> None:
    sample = ended(ActiveState="activating", SubState="auto-restart", Result="signal", NRestarts="2")
    assert sample.auto_restarting and not sample.starting and not sample.running
    assert "restarted 2 times" in sample.describe()
    assert state(ActiveState="activating", SubState="start").starting


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"Result": "signal", "ExecMainCode": "2", "ExecMainStatus": "9"},
            ["SIGKILL (9)", "sglang ends itself"],
        ),
        ({"Result": "oom-kill", "ExecMainCode": "2", "ExecMainStatus": "9"}, ["out of memory"]),
        (
            {"Result": "core-dump", "ExecMainCode": "3", "ExecMainStatus": "11"},
            ["SIGSEGV (11)", "core dumped"],
        ),
        ({"Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "203"}, ["203", "python is missing"]),
        ({"Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "2"}, ["argparse"]),
        ({"Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "77"}, ["exit status 77"]),
        (
            {"Result": "start-limit-hit", "ExecMainCode": "2", "ExecMainStatus": "15"},
            ["SIGTERM", "reset-failed"],
        ),
        ({"LoadState": "bad-setting"}, ["bad-setting", "systemd-analyze verify"]),
        ({"LoadState": "masked"}, ["is masked"]),
        ({"NeedDaemonReload": "yes"}, ["daemon-reload"]),
    ],
)
def test_describe(more: dict[str, Any], words: list[str]) -> None:
    text = ended(**more).describe()
    assert "\n" not in text
    for word in words:
        assert word in text
    if more.get("Result") == "signal":
        assert "out of memory" not in text


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"NRestarts": "1"}, "NRestarts"),
        ({"InvocationID": "f" * 32}, "InvocationID"),
        ({"MainPID": "1108"}, "MainPID"),
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm"}, "deactivating"),
    ],
)
def test_stability(more: dict[str, str], reason: str | None) -> None:
    found = state(**more).stable_against(state())
    if reason is None:
        assert found is None
    else:
        assert found is not None and reason in found
    if more.get("ActiveState"):
        assert "not running before" in (state().stable_against(state(**more)) or "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1min 30s", 90.0),
        ("2min", 120.0),
        ("500ms", 0.5),
        ("1h 1us", 3600.000001),
        ("infinity", math.inf),
        ("0", 0.0),
    ],
)
def test_span(text: str, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5", "5 min"])
def test_no_span(text: str) -> None:
    with pytest.raises(ValueError):
        parse_span(text)


def test_drop_ins_that_systemd_has_not_read_are_found_on_disk(tmp_path: Path) -> None:
    def write(path: str, text: str = "[Service]\n") -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    expected = [
        write("etc/sglang-a-b.service.d/own.conf"),
        write("run/sglang-a-.service.d/prefix.conf"),
        write("lib/sglang-.service.d/stem.conf"),
        write("lib/service.d/kind.conf"),
    ]
    write("lib/sglang-a-b.service.d/own.conf")
    write("etc/sglang-a-b.service.d/note.txt")
    write("etc/sglang-a.service.d/other-unit.conf")
    write("etc/sglang-a-b.service.d/empty.conf", "")
    write("lib/service.d/empty.conf")
    (tmp_path / "etc/service.d").mkdir()
    (tmp_path / "etc/service.d/off.conf").symlink_to("/dev/null")
    write("lib/service.d/off.conf")
    folders = [str(tmp_path / name) for name in ("etc", "run", "lib")]
    assert agent.unread_drop_ins("sglang-a-b.service", [], folders) == sorted(expected)
    (tmp_path / "link").symlink_to(tmp_path / "etc")
    read = [str(tmp_path / "link/sglang-a-b.service.d/own.conf"), *expected[2:]]
    assert agent.unread_drop_ins("sglang-a-b.service", read, folders) == [expected[1]]
    assert state(DropInsUnread="/a.conf\n/b.conf").unread_drop_ins == ("/a.conf", "/b.conf")
