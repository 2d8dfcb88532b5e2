"""Every wrapping a log comes in: the same server, the same lines, and who says them when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_ops.deploy.evidence import evidence_files
from ddtree_ops.diagnose.formats import NAMES, detect, unwrap
from ddtree_ops.diagnose.lines import LogLine, Reader, from_entries, read_log
from ddtree_ops.service.journal import parse_entries

DATA = Path(__file__).parents[1] / "data"
LOG = (
    "[2026-11-29 14:00:00 TP0] Load weight begin. avail mem=21.72 GB",
    "[2026-11-29 14:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/engine/sglang/srt/managers/scheduler.py", line 12, in run',
    "    self.step()",
    "",
    'RuntimeError: "quoted" and C:\\path <tag> & tab\there, ünïcode',
    '[2026-11-29 14:00:02] INFO:     127.0.0.1:40000 - "GET /health HTTP/1.1" 200 OK',
)
ZULU = "2026-11-29T14:00:00.123456789Z"


def docker_json(text: str) -> str:
    record = json.dumps(
        {"log": f"{text}\n", "stream": "stderr", "time": ZULU}, ensure_ascii=False, separators=(",", ":")
    )
    for char in "<>&":
        record = record.replace(char, f"\\u{ord(char):04x}")
    return record


def entry(message: object, **fields: str) -> str:
    return json.dumps(
        {
            "__REALTIME_TIMESTAMP": "1795960800123456",
            "_HOSTNAME": "ct200",
            "_PID": "218",
            "_TRANSPORT": "stdout",
            "_SYSTEMD_UNIT": "sglang.service",
            "SYSLOG_IDENTIFIER": "python",
            "MESSAGE": message,
            **fields,
        }
    )


WRAPPINGS: dict[str, tuple[Callable[[str], str], str, int | None, str]] = {
    "plain": (str, "", None, ""),
    "journal-json": (entry, "2026-11-29T14:00:00.123456+00:00", 218, "ct200"),
    "journal bytes": (
        lambda text: entry(list(text.encode())),
        "2026-11-29T14:00:00.123456+00:00",
        218,
        "ct200",
    ),
    "json-sse": (lambda text: f"data: {entry(text)}", "2026-11-29T14:00:00.123456+00:00", 218, "ct200"),
    "short": (lambda text: f"Nov 29 14:00:00 ct200 python[218]: {text}", "Nov 29 14:00:00", 218, "ct200"),
    "short, other program": (
        lambda text: f"Nov  9 14:00:00 ct200 run-engine.sh[218]: {text}",
        "Nov  9 14:00:00",
        218,
        "ct200",
    ),
    "short-precise": (
        lambda text: f"Nov 29 14:00:00.123456 ct200 python[218]: {text}",
        "Nov 29 14:00:00.123456",
        218,
        "ct200",
    ),
    "short-iso": (
        lambda text: f"2026-11-29T14:00:00+0000 ct200 python[218]: {text}",
        "2026-11-29T14:00:00+0000",
        218,
        "ct200",
    ),
    "short-iso-precise": (
        lambda text: f"2026-11-29T14:00:00.123456+00:00 ct200 python3.12[218]: {text}",
        "2026-11-29T14:00:00.123456+00:00",
        218,
        "ct200",
    ),
    "short-full, with-unit": (
        lambda text: f"Sun 2026-11-29 14:00:00 UTC ct200 sglang.service[218]: {text}",
        "Sun 2026-11-29 14:00:00 UTC",
        218,
        "ct200",
    ),
    "short-monotonic": (
        lambda text: f"[  123.456789] ct200 python[218]: {text}",
        "[  123.456789]",
        218,
        "ct200",
    ),
    "short-unix": (
        lambda text: f"1795960800.123456 ct200 python[218]: {text}",
        "1795960800.123456",
        218,
        "ct200",
    ),
    "docker json-file": (docker_json, ZULU, None, ""),
    "docker logs -t": (lambda text: f"{ZULU} {text}", ZULU, None, ""),
    "containerd": (lambda text: f"{ZULU} stderr F {text}", ZULU, None, ""),
    "kubectl --prefix": (lambda text: f"[pod/llm-0/server] {text}", "", None, "pod/llm-0/server"),
    "kubectl --prefix --timestamps": (
        lambda text: f"[pod/llm-0/server] {ZULU} {text}",
        ZULU,
        None,
        "pod/llm-0/server",
    ),
    "compose": (lambda text: f"sglang-1  | {text}", "", None, "sglang-1"),
    "compose, colours": (lambda text: f"\x1b[36msglang-1  |\x1b[0m {text}", "", None, "sglang-1"),
    "compose -t": (lambda text: f"sglang-1  | {ZULU} {text}", ZULU, None, "sglang-1"),
    "pm2": (lambda text: f"0|sglang   | {text}", "", None, "0|sglang"),
    "ray": (lambda text: f"(EngineActor pid=218, ip=192.0.2.7) {text}", "", 218, ""),
    "actions": (
        lambda text: f"2026-11-29T14:00:00.1234567Z {text}",
        "2026-11-29T14:00:00.1234567Z",
        None,
        "",
    ),
    "gh run view": (
        lambda text: f"serve\tRun the server\t2026-11-29T14:00:00.1234567Z {text}",
        "2026-11-29T14:00:00.1234567Z",
        None,
        "",
    ),
    "quoted": (lambda text: f"> {text}", "", None, ""),
    "quoted twice": (lambda text: f"> > {text}", "", None, ""),
    "quoted short": (
        lambda text: f"> Nov 29 14:00:00 ct200 python[218]: {text}",
        "Nov 29 14:00:00",
        218,
        "ct200",
    ),
    "indented": (lambda text: f"    {text}" if text else "", "", None, ""),
    "json lines": (lambda text: json.dumps({"level": "info", "msg": text, "ts": "14:00"}), "14:00", None, ""),
}


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_wrapping(name: str, ending: str) -> None:
    wrap, time, pid, host = WRAPPINGS[name]
    data = "".join(f"{wrap(text)}{ending}" for text in LOG).encode()
    lines = list(read_log(data))
    assert [line.text for line in lines] == list(LOG)
    if name != "indented":
        assert {(line.time, line.pid, line.host, line.source) for line in lines} == {
            (time, pid, host, "process")
        }
    assert [line.number for line in lines] == list(range(1, len(LOG) + 1))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_form_is_named(name: str) -> None:
    wrap = WRAPPINGS[name][0]
    assert detect(wrap(text) for text in LOG).name in NAMES


def test_files_of_several_wrappings_in_a_row() -> None:
    data, expected = "", []
    for wrap, time, pid, host in (WRAPPINGS[name] for name in WRAPPINGS if "quoted" not in name):
        if wrap("x").startswith(" "):
            continue
        data += "".join(f"{wrap(text)}\n" for text in LOG)
        expected += [(text, time, pid, host) for text in LOG]
    found = [(line.text, line.time, line.pid, line.host) for line in read_log(data.encode())]
    assert found == expected


@pytest.mark.parametrize(
    ("line", "source", "text"),
    [
        ("Nov 29 14:00:00 ct200 systemd[1]: sglang.service: Main process exited", "systemd", "sglang.service: Main process exited"),
        ("Nov 29 14:00:00 ct200 kernel: NVRM: Xid (PCI:0000:01:00): 79", "kernel", "NVRM: Xid (PCI:0000:01:00): 79"),
        ("Nov 29 14:00:00 ct200 kernel: [ 12.345678] NVRM: Xid", "kernel", "NVRM: Xid"),
        ("[12345.678901] NVRM: Xid (PCI:0000:01:00): 79", "kernel", "NVRM: Xid (PCI:0000:01:00): 79"),
        ("[    0.000000] Linux version 6.8.0", "kernel", "Linux version 6.8.0"),
        ("[Sun Nov 29 14:00:00 2026] Out of memory: Killed process 7", "kernel", "Out of memory: Killed process 7"),
        ("kern  :err   : [12345.678901] NVRM: Xid", "kernel", "NVRM: Xid"),
        ("<3>[12345.678901] NVRM: Xid", "kernel", "NVRM: Xid"),
        ("2026-11-29T14:00:00,123456+00:00 NVRM: Xid", "kernel", "NVRM: Xid"),
        ("Sun 2026-11-29 14:00:00 UTC ct200 init.scope[1]: Stopping sglang", "systemd", "Stopping sglang"),
        (entry("x", _TRANSPORT="kernel"), "kernel", "x"),
        (entry("Stopping sglang", UNIT="sglang.service"), "systemd", "Stopping sglang"),
        (entry("Suppressed 7 messages", MESSAGE_ID="a596d6fe7bfa4994828e72309e95d61e"), "systemd", "Suppressed 7 messages"),
    ],
)  # fmt: skip
def test_who_speaks(line: str, source: str, text: str) -> None:
    (found,) = read_log(line.encode())
    assert (found.source, found.text) == (source, text)
    assert found.time


@pytest.mark.parametrize(
    "line",
    [
        "Loading safetensors checkpoint shards:  45% Completed | 29/64 [00:01<00:01,  1.0it/s]",
        "100%|██████████| 3/3 [00:01<00:00]",
        "  | Traceback (most recent call last):",
        "Name | Value",
        "RuntimeError: 2026-11-29T14:00:00Z host python[1]: no",
        "[rank0]: Traceback (most recent call last):",
        "INFO:     127.0.0.1:1 - x",
        "(no) pid=1",
        "{not json",
        '{"a": 1}',
        "[1, 2, 3]",
        "1e400",
        "2026-11-29 14:00:00 INFO plain logger",
        "> a prompt of a shell",
        "```",
        "a\tb\tc",
        "",
    ],
)
def test_text_that_only_looks_wrapped_stays(line: str) -> None:
    data = f"{LOG[0]}\n{line}\n{LOG[1]}\n{LOG[2]}\n".encode()
    assert [found.text for found in read_log(data)][1:-2] == ([] if line == "```" else [line])


def test_a_paste_with_fences_and_words_around() -> None:
    data = "It dies with this:\n```text\n" + "\n".join(LOG) + "\n```\nAny idea?\n"
    assert [line.text for line in read_log(data.encode())] == ["It dies with this:", *LOG, "Any idea?"]


def test_a_quoted_answer_around_a_paste() -> None:
    data = "Hello,\n\n" + "\n".join(f"> {text}" for text in ["```", *LOG, "```"]) + "\n\nthe same here\n"
    assert [line.text for line in read_log(data.encode())] == ["Hello,", "", *LOG, "", "the same here"]


def test_frames_keep_their_indentation_in_a_fragment() -> None:
    data = '  File "/a/b.py", line 1, in f\n    g()\n  File "/a/c.py", line 2, in g\n    raise X\n'
    assert [line.text for line in read_log(data.encode())] == data.splitlines()
    shifted = "".join(f"    {text}\n" for text in data.splitlines())
    assert [line.text for line in read_log(shifted.encode())] == data.splitlines()


def test_split_records_are_joined() -> None:
    docker = [
        {"log": "[2026-11-29 14:00:00] server_args=Ser", "stream": "stderr", "time": ZULU},
        {"log": "an access line\n", "stream": "stdout", "time": ZULU},
        {"log": "verArgs(a=1)\n", "stream": "stderr", "time": ZULU},
    ]
    data = "".join(json.dumps(record) + "\n" for record in docker).encode()
    assert [(line.text, line.number) for line in read_log(data)] == [
        ("an access line", 2),
        ("[2026-11-29 14:00:00] server_args=ServerArgs(a=1)", 1),
    ]
    cri = f"{ZULU} stderr P one \n{ZULU} stdout F other\n{ZULU} stderr P two \n{ZULU} stderr F three\n"
    assert [line.text for line in read_log(cri.encode())] == ["other", "one two three"]
    long = [
        entry("one ", _STREAM_ID="a", _LINE_BREAK="line-max"),
        entry("between", _STREAM_ID="b"),
        entry("two", _STREAM_ID="a"),
        entry("begun", _STREAM_ID="c", _LINE_BREAK="line-max"),
    ]
    assert [line.text for line in read_log("\n".join(long).encode())] == ["between", "one two", "begun"]


def test_messages_with_newlines_colours_and_progress_bars() -> None:
    assert [(line.text, line.number) for line in read_log(entry("a\nb\n").encode())] == [("a", 1), ("b", 1)]
    bar = list(b"\x1b[32mLoading 1/3\rLoading 2/3\rLoading 3/3\x1b[0m")
    assert [line.text for line in read_log(entry(bar).encode())] == ["Loading 3/3"]
    coloured = docker_json("\x1b[31mRuntime\x1b[1mError\x1b[0m: x")
    assert "\\u001b" in coloured
    assert [line.text for line in read_log(coloured.encode())] == ["RuntimeError: x"]


def test_withheld_and_torn_entries_are_counted() -> None:
    reader = Reader(b"")
    assert [line.text for line in reader.line(entry(None).encode(), 1)] == [""]
    torn = entry('said \\u00fc "this" ' + "x" * 100)[:-60].encode()
    (line,) = reader.line(torn, 2)
    assert line.text.startswith('said \\u00fc "this" x')
    assert reader.damaged == 2


@pytest.mark.parametrize("path", sorted((DATA / "journal").glob("*.json")), ids=lambda path: path.stem)
def test_recorded_journals_read_as_the_live_path_reads_them(path: Path) -> None:
    data = path.read_bytes()
    live = [(x.text, x.time, x.source, x.pid) for x in from_entries(parse_entries([data]))]
    assert [(x.text, x.time, x.source, x.pid) for x in read_log(data)] == live


def test_our_own_evidence_reads_as_it_was_written() -> None:
    data = (DATA / "journal/crash-while-serving.json").read_bytes()
    entries = list(parse_entries([data]))
    kept = evidence_files(entries, "", [])["journal.jsonl"].encode()
    assert detect(kept.decode().splitlines()).name == "own-jsonl"
    assert [(x.text, x.time, x.source, x.pid) for x in read_log(kept)] == [
        (x.text, x.time, x.source, x.pid) for x in from_entries(entries)
    ]


def machine(short: bool) -> bytes:
    """A whole machine's journal: the server between others."""

    def said(unit: str, name: str, pid: int, text: str, **fields: str) -> str:
        if short:
            return f"Nov 29 14:00:00 ct200 {name}[{pid}]: {text}"
        return entry(text, SYSLOG_IDENTIFIER=name, _SYSTEMD_UNIT=unit, _PID=str(pid), **fields)

    lines = [
        said("cron.service", "CRON", 1, "(root) CMD (test -x /usr/sbin/anacron)"),
        said(
            "ssh.service", "sshd", 2, "error: kex_exchange_identification: Connection closed by remote host"
        ),
        said("sglang.service", "python", 3, LOG[0]),
        said("init.scope", "systemd", 1, "cron.service: Failed with result 'signal'.", UNIT="cron.service"),
        said(
            "init.scope", "systemd", 1, "sglang.service: Failed with result 'signal'.", UNIT="sglang.service"
        ),
        said("apt-daily.service", "unattended-upgrade", 9, "Traceback (most recent call last):"),
        said("backup.service", "backup", 9, "Traceback (most recent call last):"),
        *(said("sglang.service", "python", 3, text) for text in LOG[1:]),
    ]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("short", [False, True])
def test_of_a_whole_machine_only_the_server_is_read(short: bool) -> None:
    lines: list[LogLine] = list(read_log(machine(short)))
    assert [line.text for line in lines] == [LOG[0], "sglang.service: Failed with result 'signal'.", *LOG[1:]]


def test_a_unit_of_a_name_that_says_nothing_is_read_where_it_is_alone() -> None:
    data = "\n".join(
        f"Nov 29 14:00:00 ct200 numactl[7]: {text}" for text in ("exec: python: not found", "bye")
    )
    assert [line.text for line in read_log(data.encode())] == ["exec: python: not found", "bye"]


def test_unwrap_says_nothing_for_a_fence() -> None:
    form = detect(["```", LOG[0], "```"])
    assert form.fenced
    assert unwrap("```", form) is None


@pytest.mark.parametrize("stamp", ["[2026-03-02T10:11:12.123Z] ", "[2026-03-02T10:11:12+01:00] "])
def test_stamps_in_brackets_before_a_line_leave_its_rank(stamp: str) -> None:
    texts = ["[2026-03-02 10:11:12 TP3] Scheduler hit an exception: no", '  File "/x/a.py", line 3, in f', ""]
    lines = list(read_log("\n".join(stamp + text for text in texts).encode()))
    assert [line.text for line in lines] == texts
    assert {line.time for line in lines} == {stamp.strip("[] ")}
