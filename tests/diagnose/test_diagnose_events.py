"""The parser: prefixes, phases, batch figures, dumps, tracebacks."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.diagnose import (
    LogLine,
    PhaseKind,
    ServiceFacts,
    diagnose,
    fingerprint,
    parse_decode,
    parse_events,
    parse_phase,
    parse_prefix,
    parse_server_args,
    read_log,
)
from ddtree_ops.diagnose.events import Frame, TextLine, Traceback
from ddtree_ops.diagnose.lines import MAX_LINE, clean

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("text", "rank", "body"),
    [
        ("[2026-01-29 00:24:41 TP0] Load", "TP0", "Load"),
        ("[2026-01-29 00:24:41] Load", "", "Load"),
        ("[2026-01-29 00:24:41 DP1 PP0 TP13 EP3] Load", "DP1 PP0 TP13 EP3", "Load"),
        ("[2026-01-29 00:24:41 TP0 EP0] Load", "TP0 EP0", "Load"),
        ("[2026-01-29 00:21:36] WARNING model_config.py:885: DeepGemm", "", "DeepGemm"),
        ("[2026-11-29 14:15:48] INFO:     Started server process [1]", "", "Started server process [1]"),
    ],
)
def test_prefix(text: str, rank: str, body: str) -> None:
    prefix = parse_prefix(text)
    assert prefix is not None
    assert (prefix.rank, prefix.body) == (rank, body)
    assert prefix.time.startswith("2026-")


@pytest.mark.parametrize(
    "text", ["", "[", "[Gloo] Rank 0", "[2026-01-29]", "x [2026-01-29 00:24:41] y", "[W1129 14:55:15.3 x]"]
)
def test_no_prefix(text: str) -> None:
    assert parse_prefix(text) is None


def phases(path: Path) -> list[str]:
    found = (parse_phase(line.text) for line in read_log(path.read_bytes()))
    return [kind for kind, _ in itertools.groupby(str(phase.kind) for phase in found if phase)]


def test_phases_of_a_whole_start() -> None:
    start = ["distributed", "weights-begin", "weights", "weights-end", "kv-cache"]
    graphs = ["graph-begin", "graph-sizes", "graph", "graph-end"]
    assert phases(DATA / "logs/h200-dflash.log") == [
        "arguments", *start, *graphs, "graph-begin", "graph", "graph-end", *start, *graphs,
        "draft-ready", "limits", "starting-http", "http", "ready",
    ]  # fmt: skip


def test_phase_figures() -> None:
    bar = "Loading safetensors checkpoint shards:  45% Completed | 29/64 [00:20<00:25,  1.40it/s]"
    weights = parse_phase(bar)
    assert weights is not None and (weights.kind, weights.done, weights.total) == (PhaseKind.WEIGHTS, 29, 64)
    assert weights.fraction == pytest.approx(29 / 64)
    graph = parse_phase(
        "Capturing batches (bs=2 avail_mem=105.50 GB):  50%|█████     | 2/4 [00:02<00:06,  2.24s/it]"
    )
    assert graph is not None and (graph.kind, graph.done, graph.total) == (PhaseKind.GRAPH, 2, 4)
    assert graph.fields["bs"] == "2"
    end = parse_phase(
        "[2026-01-29 00:50:15 TP7] Load weight end. elapsed=1194.02 s, type=X, avail mem=20.21 GB."
    )
    assert end is not None and end.kind is PhaseKind.WEIGHTS_END and end.rank == "TP7"
    assert end.fields["elapsed"] == "1194.02" and end.fraction is None
    pool = parse_phase("[2026-01-29 00:23:36 TP0] KV Cache is allocated. #tokens: 4578, KV size: 0.30 GB")
    assert pool is not None and pool.fields["#tokens"] == "4578"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "[2026-01-29 00:24:42 TP0] Scheduler hit an exception: Traceback (most recent call last):",
            PhaseKind.FAILED,
        ),
        ("[2026-01-29 00:24:42] SIGQUIT received. signum=None", PhaseKind.FAILED),
        (
            "[2026-01-29 00:24:42] Subprocess scheduler_0 (pid=2) crashed with exit code -9. X",
            PhaseKind.FAILED,
        ),
        ("[2026-01-29 00:24:42] SIGTERM received. signum=None", PhaseKind.STOPPING),
        ("INFO:     Uvicorn running on http://127.0.0.1:1", PhaseKind.HTTP),
        ("[2026-01-29 00:24:42] The server is fired up and ready to roll!", PhaseKind.READY),
    ],
)
def test_phase_kinds(text: str, kind: PhaseKind) -> None:
    phase = parse_phase(text)
    assert phase is not None and phase.kind is kind


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[2026-01-29 00:24:42] hello", "the model said: The server is fired up and ready to roll!"],
)
def test_no_phase(text: str) -> None:
    assert parse_phase(text) is None


def test_decode_figures() -> None:
    figures = parse_decode(
        "[2026-11-29 14:15:53 TP0] Decode batch, #running-req: 4, #token: 494, token usage: 0.05, accept len: 7.96, "
        "accept rate: 0.99, cuda graph: True, gen throughput (token/s): 7265.40, #queue-req: 2, new field: 1"
    )
    assert figures is not None
    assert (figures.running, figures.tokens, figures.queued) == (4, 494, 2)
    assert (figures.accept_len, figures.accept_rate, figures.token_usage) == (7.96, 0.99, 0.05)
    assert figures.cuda_graph is True and figures.gen_throughput == 7265.40
    assert figures.rank == "TP0" and figures.fields["new field"] == "1"
    plain = parse_decode(
        "[2026-01-29 00:51:15 TP0] Decode batch, #running-req: 1, #token: 50, cuda graph: False, #queue-req: 0, "
    )
    assert plain is not None
    assert plain.accept_len is None and plain.cuda_graph is False and plain.queued == 0
    assert parse_decode("[2026-01-29 00:51:15] Prefill batch, #new-seq: 1") is None
    assert parse_decode("user text: Decode batch, #running-req: 1") is None


def test_server_args() -> None:
    text = (
        "server_args=ServerArgs(a='x\\'y, z=1', api_key='sk-1', admin_api_key=None, b=[1, 2], c={'k': (1, 2)}, d=None, "
        "e=0.5, f=Foo(a=1), g=True, max_total_tokens=5) trailing=1"
    )
    values = parse_server_args(text)
    assert values == {
        "a": "x\\'y, z=1", "api_key": "********", "admin_api_key": None, "b": "[1, 2]", "c": "{'k': (1, 2)}", "d": None,
        "e": 0.5, "f": "Foo(a=1)", "g": True, "max_total_tokens": 5,
    }  # fmt: skip
    assert parse_server_args("nothing") is None
    assert parse_server_args("ServerArgs(a=1, b='cut of") == {"a": 1}


def test_recorded_server_args_become_facts() -> None:
    report = diagnose(read_log((DATA / "logs/h200-dflash.log").read_bytes()), ServiceFacts(tensor_parallel=4))
    facts = report.facts
    assert (facts.algorithm, facts.block_size, facts.attention_backend) == ("DFLASH", 8, "triton")
    assert facts.tensor_parallel == 4, "what is given is never overwritten"
    assert facts.context_length == 2048
    assert "block_size" in facts.learned and "tensor_parallel" not in facts.learned
    assert report.decode.accept_len == pytest.approx(7.94, abs=0.01)
    assert report.decode.cuda_graph is True


def test_clean() -> None:
    assert clean("\x1b[31mred\x1b[0m \x1b]8;;x\x07link") == ["red link"]
    assert clean("a\rb\r\n".rstrip("\n")) == ["b"]
    assert clean("0%| | 0/5 [00:00<?, ?it/s][2026-11-29 14:15:43] Compiling") == [
        "0%| | 0/5 [00:00<?, ?it/s]", "[2026-11-29 14:15:43] Compiling",
    ]  # fmt: skip


def test_read_log_bounds_a_line() -> None:
    lines = list(read_log(io.BytesIO(b"a" * (3 * MAX_LINE) + b"\nnext\n\xff\xfe")))
    assert [line.number for line in lines] == [1, 2, 3]
    assert len(lines[0].text) == MAX_LINE
    assert [line.text for line in lines[1:]] == ["next", "\ufffd\ufffd"]


BLOCK = (
    "Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/rel/sglang/srt/managers/scheduler.py", line 3934, in run_scheduler_process',
    "    scheduler.run_event_loop()",
    "    ^^^^^^^^^^^^^^^^^^^^^^^^^^",
    '  File "/opt/rel/sglang/srt/models/example.py", line {line}, in forward',
    "    raise ValueError(shape)",
    "ValueError: rank {rank} of 8 at 0x7f00{rank}",
    "",
)


def record(rank: int, line: int = 99) -> list[str]:
    block = [text.format(rank=rank, line=line) for text in BLOCK]
    return [f"[2026-11-29 14:53:24 TP{rank}] {block[0]}", *block[1:]]


def tracebacks(lines: list[LogLine]) -> list[Traceback]:
    return [event for event in parse_events(lines) if isinstance(event, Traceback)]


def test_eight_ranks_interleaved_in_a_journal() -> None:
    lines = []
    for row in zip(*(record(rank) for rank in range(8)), strict=True):
        for rank, text in enumerate(row):
            lines.append(LogLine(text, len(lines) + 1, "2026-11-29T14:53:24+00:00", "process", 1000 + rank))
    found = tracebacks(lines)
    assert [item.rank for item in found] == [f"TP{rank}" for rank in range(8)]
    assert all(len(item.exceptions[0].frames) == 2 for item in found)
    report = diagnose(lines)
    assert report.root is not None
    assert report.root.signature == "unknown"
    assert report.root.count == 8 and len(report.root.ranks) == 8
    assert [item.signature for item in report.consequences] == ["sched-exc"]


@pytest.mark.parametrize("cut", range(1, len(BLOCK)))
def test_two_ranks_interleaved_in_a_plain_log(cut: int) -> None:
    """Without PIDs the frames of the two cannot be told apart for sure, but both exceptions are seen."""
    first, second = record(0), record(1)
    texts = [*first[:cut], *second, *first[cut:]]
    report = diagnose([LogLine(text, number) for number, text in enumerate(texts, 1)])
    assert report.root is not None and report.root.signature == "unknown"
    assert report.root.title == "unknown failure: ValueError"
    assert {item.signature for item in report.diagnoses} == {"unknown"}


def test_fingerprint_is_stable() -> None:
    prints = set()
    for rank, line in ((0, 99), (5, 1234)):
        report = diagnose([LogLine(text, number) for number, text in enumerate(record(rank, line), 1)])
        assert report.root is not None
        prints.add(report.root.fingerprint)
    assert len(prints) == 1
    frame = Frame("/a/b/sglang/x.py", 3, "f")
    same = fingerprint("E", "pid 12 at 0x7ffd in /tmp/a/file 33 GB TP3", frame)
    assert same == fingerprint(
        "E", "pid 99 at 0x1 in /var/lib/file 12.5 GB TP0", Frame("/c/sglang/x.py", 9, "f")
    )
    assert same != fingerprint(
        "E", "pid 12 at 0x7ffd in /tmp/a/file 33 GB TP3", Frame("/c/sglang/x.py", 9, "g")
    )
    assert same != fingerprint("F", "pid 12 at 0x7ffd in /tmp/a/file 33 GB TP3", frame)


def test_chain_is_kept_in_order() -> None:
    text = (DATA / "logs/cpu-badmodel.log").read_bytes()
    (found,) = tracebacks(list(read_log(text)))
    assert [(block.type.rpartition(".")[2], block.link) for block in found.exceptions] == [
        ("HFValidationError", ""), ("OSError", "cause"),
    ]  # fmt: skip


def test_lines_after_a_traceback_are_lines_again() -> None:
    lines = [
        LogLine(text, n)
        for n, text in enumerate([*record(0), "plain words", "[2026-11-29 14:53:25] more"], 1)
    ]
    rest = [event.body for event in parse_events(lines) if isinstance(event, TextLine)]
    assert rest == ["plain words", "more"]


def test_a_traceback_without_end_is_reported() -> None:
    report = diagnose([LogLine(text, number) for number, text in enumerate(record(0)[:4], 1)])
    assert report.root is not None
    assert "cut off" in report.root.title


def test_who_only_parses_lines_does_not_load_the_signatures() -> None:
    program = "import sys, ddtree_ops.diagnose.events; print('ddtree_ops.diagnose.library' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
