"""``signatures list``, ``show`` and ``test``: what they print, and how they end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ddtree_ops.cli.app import app
from ddtree_ops.diagnose.library import load_library

SIGNATURE = """\
id: slow-disk
title: the disk is slow
pattern: 'load took (?P<seconds>\\d+) s'
literal: load took
where: log
severity: degraded
explanation: 'Reading the weights took {seconds} s.'
remedy: put the weights on a local disk
source: ours
examples: [load took 900 s]
lookalikes: [load took place]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one signature, in the current directory."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "slow-disk.yaml").write_text(SIGNATURE)
    return directory


def call(*words: str, code: int = 0, stdin: str | None = None) -> Result:
    done = CliRunner().invoke(
        app, ["signatures", *words], input=stdin, env={"COLUMNS": "200", "TERM": "dumb"}
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        if code == 0:
            raise done.exception
        assert getattr(done.exception, "exit_code", None) == code
        return done
    assert done.exit_code == code, done.output
    return done


def refusal(*words: str, code: int) -> str:
    done = call(*words, code=code)
    return done.exception.render() if hasattr(done.exception, "render") else done.output


def test_list(own: Path) -> None:
    lines = call("list").stdout.splitlines()
    count = len(load_library().signatures)
    assert lines[0].split() == ["ID", "SEVERITY", "WHERE", "TITLE", "ORIGIN"]
    assert lines[-1] == f"{count} signatures, 0 of them your own"
    assert len(lines) == count + 2
    severities = [line.split()[1] for line in lines[1:-1]]
    assert severities == sorted(severities, key=["fatal", "degraded", "request", "benign"].index)
    lines = call("list", "--severity", "degraded", "--signatures-dir", "own").stdout.splitlines()
    assert any(line.split()[0] == "slow-disk" and line.endswith("own/slow-disk.yaml") for line in lines)
    assert lines[-1].endswith("1 of them your own")


def test_list_json(own: Path) -> None:
    found = json.loads(call("list", "--where", "kernel", "--json").stdout)
    assert found["schema"] == 1
    assert {"xid", "host-oom"} <= {item["id"] for item in found["signatures"]}
    assert all("kernel" in item["where"] and item["origin"] == "shipped" for item in found["signatures"])


def test_list_refuses_what_is_not_there() -> None:
    said = refusal("list", "--where", "journal", code=2)
    assert "there is no 'journal' (allowed: traceback, log, systemd, kernel, metrics)" in said


def test_show(own: Path) -> None:
    shown = call("show", "ddtree-graph-size").stdout
    for part in (
        "fatal",
        "  pattern  ",
        "size of tensor a",
        "solver   graph-size",
        "origin   shipped",
        "block_size 8, budget 32",
    ):
        assert part in shown
    found = json.loads(call("show", "slow-disk", "--signatures-dir", "own", "--json").stdout)
    assert found["origin"] == "own/slow-disk.yaml" and found["examples"] == [{"text": "load took 900 s"}]


def test_show_refuses_what_is_not_there() -> None:
    assert "did you mean 'port'?" in refusal("show", "prot", code=2)
    assert "ddtree-ops signatures list" in refusal("show", "zzzzzzzz", code=2)


def test_all_shipped_ones_pass() -> None:
    assert call("test").stdout.endswith(": all as their files say\n")


def test_own_ones_pass(own: Path) -> None:
    count = len(load_library().signatures) + 1
    for path in ("own", "own/slow-disk.yaml"):
        assert call("test", path).stdout.startswith(f"{count} signatures, ")
    found = json.loads(call("test", "own", "--json").stdout)
    (item,) = (item for item in found["signatures"] if item["id"] == "slow-disk")
    assert item == {
        "id": "slow-disk",
        "origin": "own/slow-disk.yaml",
        "examples": 1,
        "lookalikes": 1,
        "problems": [],
    }


def test_one_that_does_not_do_what_it_says(own: Path) -> None:
    path = own / "slow-disk.yaml"
    path.write_text(SIGNATURE.replace("load took 900 s", "load took nine s"))
    assert (
        "slow-disk (own/slow-disk.yaml): example 1 (log) does not match" in call("test", "own", code=5).stdout
    )


def test_one_that_takes_what_another_finds(own: Path) -> None:
    thief = SIGNATURE.replace("load took (?P<seconds>\\d+) s", "Port is").replace(
        "load took 900 s", "Port is"
    )
    thief = (
        thief.replace("literal: load took", "literal: Port is")
        .replace("{seconds}", "some")
        .replace("degraded", "benign")
    )
    (own / "slow-disk.yaml").write_text(thief)
    assert "is taken by slow-disk" in call("test", "own", code=5).stdout


def test_wrong_files_are_all_named(own: Path) -> None:
    (own / "slow-disk.yaml").write_text(SIGNATURE.replace("where: log", "where: lgo"))
    (own / "other.yaml").write_text(SIGNATURE)
    done = call("test", "own", code=78)
    assert "own/slow-disk.yaml:5: where: 'lgo' is not allowed (did you mean 'log'?" in done.stderr
    assert "own/other.yaml:1: id: signature file other.yaml has the id slow-disk" in done.stderr


def test_a_file_that_is_not_there(own: Path) -> None:
    assert "nowhere.yaml cannot be read" in call("test", "nowhere.yaml", code=78).stderr


LOG = """\
[2026-11-29 14:53:20] load took 900 s
[2026-11-29 14:53:20] Ignore import error when loading x: load took 7 s
[2026-11-29 14:53:21] The server is fired up and ready to roll!
"""


def test_against_a_log(own: Path) -> None:
    Path("server.log").write_text(LOG)
    for words, stdin in ((("server.log",), None), (("-",), LOG)):
        lines = call("test", "own/slow-disk.yaml", "--against", *words, stdin=stdin).stdout.splitlines()
        assert lines[0] == "log       1: [2026-11-29 14:53:20] load took 900 s"
        assert lines[1] == "          Reading the weights took 900 s."
        assert lines[2].startswith("log       2: ")
        assert lines[4] == "          but benign-optional goes first here"
        assert lines[5] == f"slow-disk: 2 matches in {words[0]}"
    found = json.loads(call("test", "own/slow-disk.yaml", "--against", "server.log", "--json").stdout)
    assert [(item["line"], item["taken_by"]) for item in found["matches"]] == [
        (1, ""),
        (2, "benign-optional"),
    ]


def test_against_finds_exceptions_in_tracebacks(own: Path) -> None:
    (own / "slow-disk.yaml").write_text(SIGNATURE.replace("where: log", "where: traceback"))
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nOSError: load took 31 s\n'
    )
    shown = call("test", "own/slow-disk.yaml", "--against", "-", stdin=text).stdout
    assert "traceback 4: OSError: load took 31 s" in shown


def test_against_a_log_without_it(own: Path) -> None:
    Path("server.log").write_text("nothing\n")
    assert "0 matches" in call("test", "own/slow-disk.yaml", "--against", "server.log", code=5).stdout


def test_against_wants_one_file_and_a_log(own: Path) -> None:
    assert "wants one signature file, there are 0" in refusal("test", "--against", "server.log", code=2)
    assert "nowhere.log cannot be read" in refusal("test", "own", "--against", "nowhere.log", code=2)


@pytest.mark.parametrize(("width", "titles"), [(72, False), (80, True)])
def test_no_row_of_the_list_is_wider_than_the_terminal(width: int, titles: bool) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    client = subprocess.Popen(
        [sys.executable, "-m", "ddtree_ops", "signatures", "list"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**env, "TERM": "xterm", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the terminal is gone with the client
        while piece := os.read(ours, 65536):
            said += piece
    os.close(ours)
    assert client.wait(300) == 0
    lines = [re.sub("\x1b\\[[0-9;]*m", "", line.rstrip()) for line in said.decode().splitlines()]
    assert len(lines) == len(load_library().signatures) + 2
    assert max(map(len, lines)) <= width
    assert ("TITLE" in lines[0]) == titles
