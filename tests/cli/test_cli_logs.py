"""``logs`` as it is typed: options that make no sense together, files, JSON, figures. No host is reached."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "logs"
LOG = """\
[2026-11-29 14:53:46] server_args=ServerArgs(model_path='/m', api_key='sk-not-to-be-seen-at-all', speculative_num_draft_tokens=8, speculative_ddtree_budget=32)
[2026-11-29 14:53:47 TP0] Load weight begin. avail mem=1 GB
[2026-11-29 14:53:48 TP1] Load weight begin. avail mem=1 GB
[2026-11-29 14:53:50] The server is fired up and ready to roll!
[2026-11-29 14:53:51 TP0] Decode batch, #running-req: 1, #token: 99, token usage: 0.00, accept len: 2.50, accept rate: 0.21, cuda graph: True, gen throughput (token/s): 100.50, #queue-req: 0
[2026-11-29 14:53:52 TP0] Decode batch, #running-req: 3, #token: 99, token usage: 0.00, accept len: 3.50, accept rate: 0.35, cuda graph: True, gen throughput (token/s): 300.50, #queue-req: 2
[2026-11-29 14:53:53 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/scheduler.py", line 1, in run_scheduler_process
RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0
api_key=sk-not-to-be-seen-at-all
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a.log").write_text(LOG)
    monkeypatch.chdir(tmp_path)
    return "a.log"


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["--since", "soon"], "'soon' is not a time", "write 2h"),
        (["--until", "@99999999999999999"], "no time in any calendar", ""),
        (["--invocation", "all"], "--invocation belongs to the journal", "leave it out"),
        (["--kernel"], "--kernel belongs to the journal", "leave it out"),
        (["--service", "a"], "--service belongs to the journal", "leave it out"),
        (["--follow"], "--follow belongs to the journal", "leave it out"),
        (["-F"], "--fixed-strings says how --grep searches", "add --grep RE"),
        (["--ignore-case"], "--ignore-case says how --grep searches", "add --grep RE"),
        (["-C", "2"], "context is shown around matches", "add --grep RE or --signatures"),
        (
            ["-A", "2", "--phase", "failed"],
            "context is shown around matches",
            "add --grep RE or --signatures",
        ),
        (["--stats", "--grep", "x"], "--grep selects lines", "--since and --lines are fine"),
        (["--stats", "--rank", "TP0"], "--rank selects lines", "leave it out"),
        (["--stats", "--lines", "5"], "--lines reads the end", "leave it out"),
        (["--grep", "("], "is not a regular expression", "add --fixed-strings"),
        (["--phase", "servin"], "did you mean", "write one of start"),
        (["--rank", "rank-3"], "'rank-3' is no rank", "write TP3"),
        (["--since", "2h", "--until", "3h"], "--since is after --until", "--since 3h --until 2h"),
        (["--limit", "one"], "--limit belongs to the journal", "leave it out"),
        (["-x", "one"], "--exclude belongs to the journal", "leave it out"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_type(
    typed: Callable[..., Any], log: str, argv: list[str], said: str, hint: str
) -> None:
    ended = typed("logs", log, *argv)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert hint in ended.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--follow", "--until", "2h"], "--until is in the past"),
        (["--follow", "--invocation", "previous"], "--invocation is in the past"),
        (["--follow", "--stats"], "--follow never ends"),
    ],
)
def test_what_makes_no_sense_of_hosts(typed: Callable[..., Any], argv: list[str], said: str) -> None:
    ended = typed("logs", "ct200", *argv)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_files_and_hosts_are_not_mixed(typed: Callable[..., Any], log: str) -> None:
    ended = typed("logs", log, "ct200")
    assert ended.code == 2
    assert "next:  ddtree-ops logs a.log" in ended.err
    assert typed("logs", "no-such.log").code == 2


def test_a_service_of_a_host_is_no_file(typed: Callable[..., Any], log: str) -> None:
    """Nor is a folder that has a host's name."""
    Path("ct200").mkdir()
    for name in ("ct200/none", "ct200"):
        ended = typed("logs", "-i", "lab", name, "--follow", "--stats")
        assert "--follow never ends" in ended.err
    ended = typed("logs", "-i", "lab", "ct200/none")
    assert (ended.code, "no service" in ended.err) == (2, True)
    assert "nor is there a file ct200/none" in ended.err
    assert "such file" in typed("logs", "./none").err


@pytest.mark.parametrize(
    ("argv", "code", "numbers"),
    [
        ([], 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (["-n", "2"], 0, [9, 10]),
        (["-g", "Load|Decode"], 0, [2, 3, 5, 6]),
        (["-g", "Load|Decode", "-n", "1"], 0, [6]),
        (["-g", "fired up", "-C", "1"], 0, [3, 4, 5]),
        (["-g", "fired up", "-B", "1", "-A", "0"], 0, [3, 4]),
        (["-g", "tensor a (8)", "-F"], 0, [9]),
        (["-g", "FIRED", "--ignore-case"], 0, [4]),
        (["-g", "not there"], 5, []),
        (["--phase", "loading"], 0, [1, 2, 3]),
        (["--phase", "serving,failed"], 0, [4, 5, 6, 7, 8, 9, 10]),
        (["--phase", "stopping"], 5, []),
        (["--rank", "TP1"], 0, [3]),
        (["--rank", "TP0", "--phase", "failed"], 0, [7, 8, 9]),
        (["--rank", "TP7"], 5, []),
        (["--signatures"], 0, [7, 9]),
        (["--signatures", "-g", "tensor"], 0, [9]),
    ],
)
def test_what_is_shown_of_a_file(
    typed: Callable[..., Any], log: str, argv: list[str], code: int, numbers: list[int]
) -> None:
    ended = typed("logs", log, *argv, "--json")
    assert ended.code == code
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert [one["line"] for one in found] == numbers
    assert "a.log: searched 10 lines from 2026-11-29 14:53:46+00:00 to 2026-11-29 14:53:53+00:00" in ended.err
    plain = typed("logs", log, *argv)
    assert plain.code == code
    shown = plain.out.splitlines()
    assert len([line for line in shown if line != "--"]) == len(numbers)
    for where in (ended, plain):
        assert "not-to-be-seen" not in where.out
        assert "\x1b" not in where.out


@pytest.mark.parametrize(
    ("argv", "numbers"),
    [
        (["--since", "2026-11-29T14:53:51"], [5, 6, 7, 8, 9, 10]),
        (["--until", "2026-11-29T14:53:48Z"], [1, 2, 3]),
        (["--since", "2026-11-29T15:53:53+01:00", "-g", "tensor"], [9]),
    ],
)
def test_lines_of_a_file_that_carry_times_are_taken_by_time(
    typed: Callable[..., Any], log: str, argv: list[str], numbers: list[int]
) -> None:
    ended = typed("logs", log, *argv, "--json")
    assert ended.code == 0
    assert [json.loads(line)["line"] for line in ended.out.splitlines()] == numbers
    figures = json.loads(typed("logs", log, "--stats", "--json", "--since", "2026-11-29T14:53:52").out)
    assert "300.5" in json.dumps(figures) and "100.5" not in json.dumps(figures)
    Path("bare.log").write_text("no time here\n")
    gone = typed("logs", "bare.log", "--since", "2h")
    assert gone.code == 8 and "no line of it is known to be of that time" in gone.err


def test_an_evidence_folder_is_a_log(typed: Callable[..., Any], log: str) -> None:
    Path("ct200-20261129T100000Z").mkdir()
    Path("ct200-20261129T100000Z/journal.jsonl").write_text(
        json.dumps({"time": "", "source": "process", "pid": 7, "message": "kept"}) + "\n"
    )
    for name in ("ct200-20261129T100000Z", "./ct200-20261129T100000Z"):
        ended = typed("logs", name)
        assert (ended.code, ended.out.strip()) == (0, "kept")
    Path("bare").mkdir()
    assert "no journal.jsonl in it" in typed("logs", "./bare").err


def test_known_lines_carry_their_signature(typed: Callable[..., Any], log: str) -> None:
    assert "\nfatal ddtree-graph-size: RuntimeError: The size" in typed("logs", log, "--signatures").out
    found = [
        json.loads(line) for line in typed("logs", log, "--signatures", "-B", "1", "--json").out.splitlines()
    ]
    assert [(one["line"], one["match"], one.get("signature")) for one in found][-2:] == [
        (8, False, None),
        (9, True, "ddtree-graph-size"),
    ]
    assert found[-1]["severity"] == "fatal"


def test_groups_of_context_are_parted(typed: Callable[..., Any], log: str) -> None:
    shown = typed("logs", log, "-g", "TP1|Scheduler", "-C", "1").out.splitlines()
    assert [line == "--" for line in shown] == [False] * 3 + [True] + [False] * 3


def test_files_are_merged_by_time_and_compressed_ones_are_read(typed: Callable[..., Any], log: str) -> None:
    lines = LOG.splitlines(keepends=True)
    Path("even.log.gz").write_bytes(gzip.compress("".join(lines[0:7:2]).encode()))
    Path("odd.log").write_text("".join(lines[1:7:2]))
    shown = typed("logs", "./even.log.gz", "odd.log").out.splitlines()
    assert [line.split()[0] for line in shown] == ["./even.log.gz", "odd.log"] * 3 + ["./even.log.gz"]


def test_nothing_to_search_is_no_miss(typed: Callable[..., Any], log: str) -> None:
    Path("empty.log").write_text("")
    assert typed("logs", "empty.log", "-g", "x").code == 8
    ended = typed("logs", "empty.log", log, "-g", "fired")
    assert (ended.code, len(ended.out.splitlines())) == (8, 1)


def test_figures_of_a_file(typed: Callable[..., Any], log: str) -> None:
    ended = typed("logs", log, "--stats")
    assert ended.code == 0
    shown = ended.out.splitlines()
    assert shown[0] == "a.log: 2 decode lines, 2 of 2 in a CUDA graph, 0 prefill lines"
    assert shown[1] == "throughput, tokens/s: min 100, mean 200, max 300 (2 samples)"
    assert "acceptance, tokens/verify step: min 2.5, mean 3, max 3.5 (2 samples)" in shown
    assert "queue, requests: min 0, mean 1, max 2 (2 samples)" in shown
    assert shown.count("         14:53:51  14:53:52") == 4
    (one,) = json.loads(typed("logs", log, "--stats", "--json").out)["stats"]
    assert (one["host"], one["searched"], one["decode_lines"], one["cuda_graph_lines"]) == (log, 10, 2, 2)
    assert one["series"]["queue"] == {
        "unit": "requests", "samples": 2, "min": 0, "mean": 1, "max": 2,
        "points": [
            {"time": "2026-11-29 14:53:51", "mean": 0, "samples": 1},
            {"time": "2026-11-29 14:53:52", "mean": 2, "samples": 1},
        ],
    }  # fmt: skip


def test_figures_without_a_decode_line_are_inconclusive(typed: Callable[..., Any], log: str) -> None:
    Path("idle.log").write_text("\n".join(LOG.splitlines()[:4]))
    ended = typed("logs", "idle.log", log, "--stats", "--json")
    assert ended.code == 8
    document = json.loads(ended.out)
    assert (document["schema"], [one["host"] for one in document["stats"]]) == (1, [log])
    assert "idle.log: no decode line in 4 lines" in document["errors"][0]
    assert typed("logs", "idle.log", "--stats").code == 8


def test_real_figures(typed: Callable[..., Any]) -> None:
    (one,) = json.loads(typed("logs", str(DATA / "h200-dflash.log"), "--stats", "--json").out)["stats"]
    assert (one["decode_lines"], one["prefill_lines"]) == (4, 8)
    assert one["series"]["accept_length"]["max"] == 8
    printed = re.findall(r"gen throughput \(token/s\): ([\d.]+)", (DATA / "h200-dflash.log").read_text())
    assert one["series"]["throughput"]["max"] == max(map(float, printed))


def run(*argv: str, cwd: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [
            "bash",
            "-c",
            'set -o pipefail; "$0" -m ddtree_ops logs "${@:2}" | eval "$1"',
            sys.executable,
            *argv,
        ],
        input=stdin,
        capture_output=True,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=300,
        check=False,
    )


def test_a_pipe_that_closes_ends_it_quietly(log: str) -> None:
    """From standard input, which is far longer than what is read of it."""
    done = run("head -n 1", "-", cwd=str(Path.cwd()), stdin=LOG.encode() * 3000)
    assert (done.returncode, done.stderr) == (0, b"-: searched " + done.stderr.partition(b"searched ")[2])
    assert done.stdout.startswith(b"[2026-11-29 14:53:46] server_args")


def test_a_terminal_without_block_elements_gets_ascii(log: str) -> None:
    done = run("cat", log, "--stats", cwd=str(Path.cwd()), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"    400 +" in done.stdout and done.stdout.isascii()


def test_a_rank_of_digits_alone_is_a_tensor_rank(typed: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    log.write_text("[2026-11-29 10:00:00 TP3] three\n[2026-11-29 10:00:01 TP1] one\n")
    assert typed("logs", str(log), "--rank", "3").out == "[2026-11-29 10:00:00 TP3] three\n"


def test_what_is_no_text_or_no_log_is_refused_in_words_of_this_command(
    typed: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 8)
    told = typed("logs", str(tmp_path / "x.bin"))
    assert (told.code, told.out) == (2, "") and "is no text" in told.err
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        archive.add(tmp_path / "x.bin", "x.log")
    told = typed("logs", str(tmp_path / "a.tgz"))
    assert told.code == 2 and "ddtree-ops logs -" in told.err and "diagnose" not in told.err


def test_control_characters_are_shown_to_a_terminal_and_not_obeyed(tmp_path: Path) -> None:
    log = tmp_path / "odd.log"
    log.write_bytes("[2026-11-29 10:00:00] a\x01b\x9b31mc\x0ed\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops", "logs", str(log)], capture_output=True, check=True, text=True,
        env={**os.environ, "FORCE_COLOR": "1"},
    )  # fmt: skip
    shown = re.sub("\x1b\\[[0-9;]*m", "", done.stdout)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert "b" in shown and "d" in shown
