"""Output: plain lines without Rich, Rich where it is asked for, silence once the reader has gone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

LINES = """
import sys
from ddtree_ops.report.output import Output
out = Output()
out.write_line("[bold]x[/] " + 200 * "y")
assert not out.is_terminal
assert "rich" not in sys.modules
"""
RICH = """
from ddtree_ops.report.output import Output
out = Output(stderr=True)
out.print("[bold]x[/]")
out.write_line("[bold]y[/]")
"""
GONE = """
import sys
from ddtree_ops.report.output import Output
out = Output()
for _ in range(3):
    out.write_line("line")
    out.print("print")
assert out.quiet
sys.stdout.write("more")
"""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)


def run(code: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=300, **more
    )  # type: ignore[call-overload, no-any-return]


def test_a_line_is_printed_as_it_is_and_without_rich() -> None:
    done = run(LINES, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[bold]x[/] " + 200 * "y" + "\n"


def test_what_rich_prints_and_lines_keep_their_order() -> None:
    assert run(RICH).stderr == "x\n[bold]y[/]\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(GONE, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_is_known() -> None:
    leader, follower = pty.openpty()
    try:
        code = "from ddtree_ops.report.output import Output; assert Output().is_terminal"
        done = run(code, stdout=follower, env={**os.environ, "TERM": "xterm"})
    finally:
        os.close(leader)
        os.close(follower)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_load_without_rich() -> None:
    done = run("import ddtree_ops.cli.app, sys; assert not {m for m in sys.modules if m.startswith('rich.')}")
    assert (done.returncode, done.stderr) == (0, "")
