"""``diagnose`` over files and standard input, as it is typed. No host is reached."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001, drafter: /d,
      speculative: {algorithm: DDTREE, block_size: 6, budget: 20}}
  b: {unit: b.service, runtime: r, venv: /v, model: /m, port: 3002}
hosts:
  one: {address: 127.0.0.1, services: {a: {}, b: {}}}
"""
PASTE = "> The size of tensor a (12) must match the size of tensor b (42) at non-singleton dimension 0\n"
KEYS = {
    "schema", "source", "verdict", "headline", "diagnoses", "consequences", "searched", "facts", "figures",
    "trace", "trace_origin", "patch", "seen", "notes", "invocation", "sources",
}  # fmt: skip


@pytest.fixture(autouse=True)
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "hosts.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return path


def document(ended) -> dict:
    return json.loads(ended.out)


def test_one_document_whatever_the_number_of_sources(typed, documented, tmp_path: Path) -> None:
    crash, sound = DATA / "logs" / "h200-oom-drafter-kv-pool.log", DATA / "logs" / "h200-dflash.log"
    ended = typed("diagnose", str(sound), str(crash), "--json")
    found = documented(ended.out)
    assert ended.code == 5
    assert set(found) == KEYS
    assert (found["schema"], found["verdict"]) == (1, "fail")
    assert found["diagnoses"][0]["source"] == str(crash), "root cause first, from wherever"
    assert found["headline"].startswith(f"{crash}: oom-kv-pool")
    assert found["searched"]["sources"] == [str(sound), str(crash)]
    assert [one["source"] for one in found["sources"]] == [str(sound), str(crash)]
    assert [one["verdict"] for one in found["sources"]] == ["pass", "fail"]
    assert found["searched"]["lines"] == sum(one["searched"]["lines"] for one in found["sources"])
    alone = documented(typed("diagnose", str(crash), "--json").out)
    assert set(alone) == KEYS and alone["sources"] == []
    assert {**found["sources"][1], "sources": []} == alone
    item = alone["diagnoses"][0]
    assert set(item) >= {
        "signature", "severity", "title", "explanation", "remedy", "ranks", "count", "first", "fingerprint",
        "evidence", "traceback", "source",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--facts", "block_size=6", "--facts", "budget=20"],
            "12 = 2 x block_size 6, 42 = 2 x (budget 20 + 1)",
        ),
        (["--service", "a"], "12 = 2 x block_size 6, 42 = 2 x (budget 20 + 1)"),
        (["--service", "a", "--facts", "patched=no"], "the deployed runner lacks patch 0001"),
        ([], "from the numbers alone"),
    ],
)
def test_what_is_known_of_the_service_of_a_log(typed, tmp_path: Path, options: list[str], said: str) -> None:
    log = tmp_path / "paste.txt"
    log.write_text(f"> RuntimeError: {PASTE[2:]}")
    ended = typed("diagnose", str(log), *options)
    assert ended.code == 5
    assert said in ended.out
    assert "seen before" not in ended.out, "where a file was written nobody knows"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--facts", "blok=6"], "there is no fact 'blok'"),
        (["--facts", "block_size=six"], "block_size is a whole number"),
        (["-i", "INVENTORY"], "the log may be of 2 services: a, b"),
        (["--service", "c"], "no service 'c'"),
    ],
)
def test_what_cannot_be_known_is_refused(
    typed, inventory: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    log = tmp_path / "paste.txt"
    log.write_text(PASTE)
    ended = typed(
        "diagnose", str(log), *(str(inventory) if word == "INVENTORY" else word for word in options)
    )
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        ([""], "an empty word names no host and no file", "quote"),
        (["one/c"], "no service of one matches 'c'", "inventory show"),
        (["one/c"], "nor is there a file one/c", "inventory show"),
        (["logs/of/one"], "nor is there a file logs/of/one", "has: one"),
        (["folder"], "the folder folder is no evidence: there is no journal.jsonl in it", "has: one"),
        (["./folder"], "./folder is a folder, and not one of evidence", "name the log files in it"),
        (
            ["there.log", "--invocation", "previous"],
            "--invocation belongs to the journal of a host",
            "name a host",
        ),
        (["there.log", "-l", "one"], "--limit belongs to the journal of a host", "name a host"),
        (["kept/"], "no evidence", "has: one"),
        (["./kept"], "not one of evidence", "./kept/a-20261130T000000Z ./kept/b-20261129T000000Z"),
        (["full"], "for the logs in it type full/*", "has: one"),
        ([sys.executable], "is no text", "name the log"),
        (["one.log"], "one.log: No such file or directory", ""),
        (["./one"], "./one: No such file or directory", ""),
        ([f"RuntimeError: {PASTE} {'x' * 5000}"], "is neither a host nor a file", "ddtree-ops diagnose -"),
        (["one", "--facts", "tp=many"], "tensor_parallel is a whole number", "tensor_parallel=8"),
        (["one", "there.log", "--facts", "=8"], "there is no fact", "facts are"),
        (["there.log", "--facts", "block_size=-8"], "block_size is a whole number", "block_size=8"),
    ],
)
def test_words_that_name_nothing_are_refused_before_anything_is_read(
    typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "server.out").write_text(PASTE)
    for name in ("a-20261130T000000Z", "b-20261129T000000Z"):
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "journal.jsonl").write_text("")
    (tmp_path / "there.log").write_text(PASTE)
    ended = typed("diagnose", *argv)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err and hint in ended.err


def test_a_host_is_a_host_though_a_file_or_folder_is_called_so(
    typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sshd answers on port 22022 of an address that nobody has: the host was asked, not the file read."""
    monkeypatch.chdir(tmp_path)
    Path("one").write_text(f"RuntimeError: {PASTE[2:]}")
    Path("other").write_text(f"RuntimeError: {PASTE[2:]}")
    text = INVENTORY.replace("address: 127.0.0.1", "address: 127.0.0.1, ssh: {port: 1}")
    (tmp_path / "hosts.yaml").write_text(text)
    asked = typed("diagnose", "one", "--service", "a")
    assert (asked.code, asked.out) == (4, "")
    assert "one is read as the host of the inventory; the file is ./one" in asked.err
    Path("one").unlink()
    Path("one").mkdir()
    for word in ("one", "one/a"):
        assert typed("diagnose", word, "--service", "a").code == 4
    read = typed("diagnose", "./other", "other")
    assert (read.code, read.err) == (5, "")


def test_a_host_that_cannot_be_asked_stands_beside_a_log_in_one_document(
    typed, documented, tmp_path: Path
) -> None:
    (tmp_path / "hosts.yaml").write_text(
        INVENTORY.replace("address: 127.0.0.1", "address: 127.0.0.1, ssh: {port: 1}")
    )
    crash = str(DATA / "logs" / "h200-oom-drafter-kv-pool.log")
    both = typed("diagnose", "one/a", crash, "--service", "a", "--json")
    found = documented(both.out)
    assert (both.code, found["verdict"], found["searched"]["sources"]) == (4, "fail", [crash])
    assert [(one["source"], one["verdict"]) for one in found["sources"]] == [
        (crash, "fail"),
        ("one/a", "inconclusive"),
    ]
    assert found["headline"].endswith("; could not be read: one/a")
    assert len(found["errors"]) == 1 and found["errors"][0].startswith("one: connect: ")
    none = documented(typed("diagnose", "one/a", "--json").out)
    assert (none["verdict"], none["searched"]["sources"], len(none["errors"])) == ("inconclusive", [], 1)
    sound = str(DATA / "logs" / "h200-dflash.log")
    half = typed("diagnose", sound, "one/a", "--service", "a", "--json")
    read = documented(half.out)
    assert (half.code, read["verdict"]) == (4, "inconclusive")
    assert read["headline"].startswith(f"{sound}: nothing wrong was found in ")
    assert "could not be read: one/a" in read["headline"] and "one/a: not read: " in read["notes"][0]


def test_secrets_in_a_log_are_not_shown(typed, documented, tmp_path: Path) -> None:
    log = tmp_path / "told.log"
    log.write_text(
        "[2026-11-29 14:53:46] server_args=ServerArgs(model_path='/m', api_key='plain-word-key')\n"
        "[2026-11-29 14:53:53 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/scheduler.py", line 1, in run\n'
        '    login(token="hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef12")\n'
        "ValueError: hf_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef12, api_key=plain-word-key, Authorization: Bearer abc.SECRET.x\n"
    )
    plain, as_json = typed("diagnose", str(log), "--verbose"), typed("diagnose", str(log), "--json")
    assert documented(as_json.out)["diagnoses"][0]["signature"] == "unknown"
    for told in (plain.out, as_json.out):
        assert "ValueError: ********" in told
        assert not [part for part in ("ABCDEFG", "plain-word", "SECRET") if part in told]


def test_evidence_is_explained_by_its_folder_and_compressed_logs_as_they_are(typed, tmp_path: Path) -> None:
    raw = (DATA / "logs" / "h200-oom-drafter-kv-pool.log").read_bytes()
    packed = tmp_path / "crash.log.gz"
    packed.write_bytes(gzip.compress(raw))
    assert document(typed("diagnose", str(packed), "--json"))["diagnoses"][0]["signature"] == "oom-kv-pool"
    packed.write_bytes(gzip.compress(raw)[:-200])
    cut = document(typed("diagnose", str(packed), "--json"))
    assert cut["verdict"] in ("fail", "inconclusive")
    assert any("not whole" in note for note in cut["notes"])
    folder = tmp_path / "ct200-20261129T100000Z"
    folder.mkdir()
    lines = [
        json.dumps({"time": "", "source": "process", "pid": 7, "message": text})
        for text in raw.decode().splitlines()
    ]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    assert document(typed("diagnose", str(folder), "--json"))["diagnoses"][0]["signature"] == "oom-kv-pool"
    assert typed("diagnose", str(tmp_path)).code == 2


def test_standard_input(typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (DATA / "journal" / "crash-while-serving.json").read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw), isatty=lambda: False))
    ended = typed("diagnose", "-", "--json")
    assert (ended.code, ended.err, document(ended)["source"]) == (5, "", "-")


def test_standard_input_that_is_a_terminal_is_told_what_to_do() -> None:
    ours, theirs = pty.openpty()
    client = subprocess.Popen(
        [sys.executable, "-m", "ddtree_ops", "diagnose", "-"], stdin=theirs, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        os.write(ours, b"nothing of a server\n\x04")
        _, said = client.communicate(timeout=300)
    finally:
        client.kill()
        client.communicate()
        os.close(theirs)
        os.close(ours)
    assert "press Ctrl-D" in said
    assert client.returncode == 8


def test_signatures_of_the_users_own(typed, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "fan-stopped.yaml").write_text(
        "id: fan-stopped\ntitle: a fan stands still\npattern: 'fan (?P<number>[0-9]+) has stopped'\nliteral: has stopped\n"
        "where: [log]\nseverity: fatal\nexplanation: 'Fan {number} stands still.'\nremedy: 'turn it'\nsource: own\n"
        "examples: ['fan 3 has stopped']\nlookalikes: ['fan has stopped']\n"
    )
    log = tmp_path / "fan.log"
    log.write_text("[2026-11-29 10:00:00 TP0] fan 3 has stopped\n")
    assert typed("diagnose", str(log)).code == 0 or typed("diagnose", str(log)).code == 8
    ended = typed("diagnose", str(log), "--signatures-dir", str(tmp_path / "own"))
    assert ended.code == 5 and "Fan 3 stands still." in ended.out


def test_verbose_shows_the_traceback(typed) -> None:
    log = str(DATA / "logs" / "h200-oom-drafter-kv-pool.log")
    plain, full = typed("diagnose", log), typed("diagnose", log, "--verbose")
    assert 'File "' not in plain.out and 'File "' in full.out


def test_a_terminal_without_utf8_gets_ascii() -> None:
    log = DATA / "logs" / "h200-oom-drafter-kv-pool.log"
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_ops", "diagnose", str(log)], capture_output=True, check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stdout.decode("ascii").startswith(f"{log}: oom-kv-pool")


LOADING = """\
[2026-11-29 14:53:46] server_args=ServerArgs(model_path='/m', tp_size=2)
[2026-11-29 14:53:53 TP0] Load weight begin. avail mem=94.20 GB
Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]
"""


def test_a_log_that_ends_while_loading_is_no_pass(typed, tmp_path: Path) -> None:
    log = tmp_path / "hangs.log"
    log.write_text(LOADING)
    ended = typed("diagnose", str(log))
    assert ended.code == 8
    assert (
        "the log ends while the server was loading (last step seen: weights 0/64); whether it went on cannot be seen"
        in " ".join(ended.out.split())
    )
    for more in (
        "[2026-11-29 15:01:00] The server is fired up and ready to roll!\n",
        "[2026-11-29 15:01:00 TP0] Prefill batch, #new-seq: 1, #new-token: 7, #cached-token: 0\n",
    ):
        log.write_text(LOADING + more)
        assert typed("diagnose", str(log)).code == 0
        log.write_text(LOADING + more + LOADING)
        assert typed("diagnose", str(log)).code == 8, "the last life counts"


@pytest.mark.parametrize(
    "command", [["deploy", "one/a"], ["smoke", "one/a"], ["wait", "one/a"], ["run", "check", "one/a"]]
)
def test_a_broken_signature_file_is_told_before_a_host_is_asked(
    typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (tmp_path / "hosts.yaml").write_text(
        INVENTORY.replace("address: 127.0.0.1", "address: 127.0.0.1, ssh: {port: 1}")
    )
    (tmp_path / "ddtree-ops" / "signatures").mkdir(parents=True)
    (tmp_path / "ddtree-ops" / "signatures" / "mine.yaml").write_text("id: mine\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ended = typed(*command)
    assert ended.code == 78
    assert "mine.yaml" in ended.err and "state: nothing was changed" in ended.err
    assert typed("stop", "one/a").code == 4, "what has no use for them goes on"
    assert typed("rollback", "one/a").code == 4
