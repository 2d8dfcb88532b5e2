"""A command that is forked behaves as one that is started: what other tests find by the first holds for the second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "argv",
    [
        ["--version"],
        ["deploy", "--help"],
        ["nope"],
        ["-i", "/nope.yaml", "plan", "x"],
        ["signatures", "list"],
        ["diagnose", "-"],
    ],
    ids=" ".join,
)
def test_output_and_status_are_those_of_a_process_of_its_own(commands, argv: list[str]) -> None:
    own = subprocess.run(
        [sys.executable, "-m", "ddtree_ops", *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    forked = commands.run(argv)
    assert (forked.returncode, forked.stdout, forked.stderr) == (own.returncode, own.stdout, own.stderr)


WAITS = "import sys\nprint('begun', sys.argv[1:], flush=True)\nimport time\nwhile True: time.sleep(0.05)"


def test_signals_reach_it_and_are_its_status(commands) -> None:
    with commands.start(["a b"], code=WAITS) as command:
        assert command.stdout.readline() == "begun ['a b']\n"
        assert command.poll() is None
        command.kill()
    assert command.returncode == -signal.SIGKILL
    with commands.start([], code=WAITS) as command:
        assert command.stdout.readline() == "begun []\n"
        command.send_signal(signal.SIGINT)
        said = command.communicate()[1]
    assert command.returncode == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")


def test_environment_folder_and_streams_are_its_own(commands, tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sorted(os.environ), sys.stdin.read()); print('err', file=sys.stderr)"
    with commands.start([], code=code, env={"A": "1"}, cwd=tmp_path) as command:
        assert command.communicate() == (f"{tmp_path} ['A'] \n", "err\n")
    with commands.start([], code=code, env={"A": "1"}, cwd=tmp_path, merged=True) as command:
        out, err = command.communicate()
    assert (sorted(out.splitlines()), err) == ([f"{tmp_path} ['A'] ", "err"], "")
    assert command.returncode == 0


def test_one_run_leaves_nothing_to_the_next(commands) -> None:
    with commands.start(
        [], code="import json, os; json.x = os.environ['A'] = '1'; raise SystemExit(7)"
    ) as command:
        command.communicate()
    assert command.returncode == 7
    with commands.start([], code="import json, os; print(hasattr(json, 'x'), 'A' in os.environ)") as command:
        assert command.communicate()[0] == "False False\n"


def test_what_takes_too_long_is_killed_and_other_variables_of_the_interpreter_start_a_new_one(
    commands,
) -> None:
    with commands.start([], code=WAITS) as command, pytest.raises(subprocess.TimeoutExpired):
        command.communicate(timeout=0.2)
    assert command.returncode == -signal.SIGKILL
    done = commands.run(["--version"], env={**os.environ, "PYTHONVERBOSE": "1"})
    assert done.returncode == 0
    assert "# installing zipimport hook" in done.stderr or "import 'ddtree_ops'" in done.stderr
