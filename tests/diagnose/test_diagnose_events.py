"""The parser: prefixes, phases, batch figures, dumps, tracebacks."""

from __future__ import annotations

import io
import itertools
import json
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
from ddtree_ops.diagnose.events import Frame, ServerArgs, TextLine, Traceback, parse_command, root_block
from ddtree_ops.diagnose.lines import MAX_LINE, clean
from ddtree_ops.secret import MASK

DATA = Path(__file__).parents[1] / "data"
MARKED = "Traceback (most recent call last):"


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


def events_of(text: str) -> list[object]:
    return list(parse_events(LogLine(line, number) for number, line in enumerate(text.splitlines(), 1)))


def record_of(text: str) -> Traceback:
    (found,) = [event for event in events_of(text) if isinstance(event, Traceback)]
    return found


def test_terminate_with_a_stack() -> None:
    found = record_of(
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an odd failure was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
        "\n"
        "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f01 in /opt/venv/torch/lib/libc10.so)\n"
        "frame #1: c10::cuda::ExchangeDevice(int) + 0xa2 (0x7f02 in /opt/venv/torch/lib/libc10_cuda.so)\n"
        "\n"
        "[2026-11-29 14:53:24] SIGQUIT received. signum=None\n"
    )
    assert found.kind == "native"
    (block,) = found.exceptions
    assert (block.type, block.message) == ("c10::Error", "CUDA error: an odd failure was encountered")
    assert str(block.frames[-1]) == "../c10/cuda/CUDAException.cpp:43 c10_cuda_check_implementation"
    assert [frame.file.rpartition("/")[2] for frame in block.frames[:2]] == ["libc10_cuda.so", "libc10.so"]


def test_a_fatal_error_of_the_interpreter() -> None:
    found = record_of(
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x00007f0100 (most recent call first):\n  File "/opt/a.py", line 3 in idle\n\n'
        'Current thread 0x00007f0200 (most recent call first):\n  File "/opt/sglang/kernel.py", line 9 in launch\n'
        '  File "/opt/sglang/model.py", line 7 in forward\n\n'
        "Extension modules: numpy._core, torch._C (total: 2)\n"
    )  # fmt: skip
    assert [str(frame) for frame in found.exceptions[0].frames] == [
        "/opt/sglang/model.py:7 forward",
        "/opt/sglang/kernel.py:9 launch",
    ]
    assert found.exceptions[0].text == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(
    "text",
    [
        "Segmentation fault (core dumped)", "free(): invalid pointer", "double free or corruption (!prev)", "malloc(): corrupted top size",
        "*** SIGABRT received at time=1795959808 on cpu 3 ***", "/usr/bin/run.sh: line 3:  4711 Aborted                 (core dumped) sglang serve",
        "!!!!!!! Segfault encountered !!!!!!!",
    ],
)  # fmt: skip
def test_a_native_death_without_a_place(text: str) -> None:
    assert record_of(text).kind == "signal"
    report = diagnose([LogLine(text, 1)])
    assert report.root is not None and report.root.evidence[0].line == 1


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (
            "thread 'tokio-runtime-worker' panicked at src/router.rs:88:14:\ncalled `Option::unwrap()` on a `None` value\nnote: run with `RUST_BACKTRACE=1`",
            "called `Option::unwrap()` on a `None` value", "src/router.rs:88 tokio-runtime-worker",
        ),
        ("thread 'main' panicked at 'index out of bounds', src/lib.rs:5:1", "index out of bounds", "src/lib.rs:5 main"),
    ],
)  # fmt: skip
def test_a_rust_panic(text: str, message: str, place: str) -> None:
    (block,) = record_of(text).exceptions
    assert (block.type, block.message, str(block.frames[-1])) == ("panic", message, place)


@pytest.mark.parametrize(
    "text",
    [
        "ptxas fatal   : Value 'sm_999x' is not defined for option 'gpu-name'", "nvcc fatal   : Unsupported gpu architecture 'compute_999x'",
        "/opt/x/kernel.cu:12:10: fatal error: odd_header.h: No such file or directory\ncompilation terminated.",
        '/opt/x/kernel.cu(33): error: identifier "odd" is undefined\n1 error detected in the compilation of "/opt/x/kernel.cu".',
        "FAILED: kernel.cuda.o \nninja: build stopped: subcommand failed.",
    ],
)  # fmt: skip
def test_what_a_compiler_says(text: str) -> None:
    found = record_of(text)
    assert found.kind == "build" and found.exceptions[0].message.splitlines()[0] == text.splitlines()[0]


def test_a_dump_of_threads_is_no_failure() -> None:
    text = (
        '[2026-11-29 14:53:24 TP0] Pyspy dump for PID 77:\nProcess 77: sglang::scheduler_TP0\nPython v3.12.3 (/usr/bin/python3.12)\n\n'
        'Thread 77 (active): "MainThread"\n    wait (threading.py:355)\n    raise_error (sglang/srt/x.py:1)\n'
        'Thread 78 (idle): "Thread-1"\n    wait (threading.py:355)\n\n[2026-11-29 14:53:25] The server is fired up and ready to roll!\n'
    )  # fmt: skip
    assert record_of(text).kind == "threads"
    assert diagnose([LogLine(line, n) for n, line in enumerate(text.splitlines(), 1)]).diagnoses == ()


def test_an_exception_group() -> None:
    found = record_of(
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/opt/a.py", line 9, in main\n'
        "  |     raise ExceptionGroup(name, errors)\n"
        "  | ExceptionGroup: several odd things (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/opt/b.py", line 3, in first\n'
        "    |     raise ValueError(x)\n"
        "    | ValueError: one\n"
        "    +---------------- 2 ----------------\n"
        "    | TypeError: two\n"
        "    +------------------------------------\n"
    )
    assert [(block.type, block.link, len(block.frames)) for block in found.exceptions] == [
        ("ExceptionGroup", "", 1), ("ValueError", "group", 1), ("TypeError", "group", 0),
    ]  # fmt: skip
    root = root_block(found.exceptions)
    assert root is not None and root.text == "ValueError: one"


def test_a_quoted_traceback_of_a_pool() -> None:
    found = record_of(
        'concurrent.futures.process._RemoteTraceback: \n"""\nTraceback (most recent call last):\n'
        '  File "/opt/sglang/srt/load.py", line 3, in read\n    raise ValueError(x)\nValueError: odd shard\n"""\n\n'
        "The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n"
        '  File "/opt/sglang/srt/main.py", line 7, in main\n    pool.map(read)\nValueError: odd shard\n'
    )
    assert [(block.message, block.link, block.frames[-1].function) for block in found.exceptions] == [
        ("odd shard", "", "read"), ("odd shard", "cause", "main"),
    ]  # fmt: skip


@pytest.mark.parametrize("margin", ["    ", "\t", "        "])
def test_an_indented_traceback(margin: str) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in f\n    raise X\nValueError: odd'
    )
    (block,) = record_of("\n".join(margin + line for line in text.splitlines())).exceptions
    assert (block.text, len(block.frames), block.frames[0].code) == ("ValueError: odd", 1, "raise X")


def test_a_syntax_error_and_notes() -> None:
    (block,) = record_of(
        'Traceback (most recent call last):\n  File "/opt/a.py", line 3\n    foo bar\n        ^^^\nSyntaxError: invalid syntax\na note on it\n'
    ).exceptions
    assert block.frames == (Frame("/opt/a.py", 3, "", "foo bar"),)
    assert block.message == "invalid syntax\na note on it"


def test_a_message_of_many_lines() -> None:
    output = "\n".join(f"[{n}/40] nvcc -c kernel{n}.cu" for n in range(1, 41))
    (block,) = record_of(
        'Traceback (most recent call last):\n  File "/opt/a.py", line 3, in build\nRuntimeError: Ninja build failed. Ninja output:\n'
        f"{output}\nkernel7.cu(3): error: odd is undefined\nninja: build stopped: subcommand failed.\n"
    ).exceptions
    assert "kernel7.cu(3): error: odd is undefined" in block.message
    assert len(block.message.splitlines()) <= 40


def test_a_dump_over_several_lines_and_as_json() -> None:
    wrapped = (
        "[2026-11-29 14:53:20] server_args=ServerArgs(model_path='/m', speculative_algorithm='DDTREE', note='CUDA er\n"
        "ror: Traceback (most recent call last)', tp_size=8, speculative_num_draft_tokens=8, speculative_dd\ntree_budget=32)\n"
        "[2026-11-29 14:53:21] more\n"
    )
    found = events_of(wrapped)
    assert isinstance(found[0], ServerArgs) and found[0].values["speculative_ddtree_budget"] == 32
    assert found[0].values["tp_size"] == 8 and len(found) == 2
    data = {
        "model_path": "/m",
        "tp_size": 8,
        "api_key": "sk-very-secret",
        "speculative_ddtree_budget": 32,
        "note": "RuntimeError: odd",
    }
    for text in (json.dumps(data), json.dumps(data, indent=2)):
        values = [event.values for event in events_of(text) if isinstance(event, ServerArgs)]
        assert values[0]["speculative_ddtree_budget"] == 32 and "very-secret" not in str(values)
        assert not any(isinstance(event, Traceback) for event in events_of(text))


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_traceback_cut_at_either_end_is_one_record(limit: int) -> None:
    lines = [*record(0)[1:-1], "[2026-11-29 14:53:25] more"]
    found = record_of("\n".join(lines[min(limit, 5) :]))
    assert found.exceptions[0].text == "ValueError: rank 0 of 8 at 0x7f000"
    found = record_of("\n".join(record(0)[: min(limit, 6)]))
    assert found.header == "Scheduler hit an exception:"


@pytest.mark.parametrize(
    "head",
    ["ERROR 03-02 10:11:12 [core.py:700] ", "(Worker pid=301) ERROR 03-02 10:11:12 [core.py:700] ", "E | "],
)
def test_a_traceback_under_what_a_logger_puts_before_each_line(head: str) -> None:
    lines = [
        MARKED,
        '  File "/opt/vllm/core.py", line 7, in run',
        "    load()",
        '  File "/opt/vllm/linear.py", line 9, in create_weights',
        "RuntimeError: first",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        MARKED,
        '  File "/opt/vllm/core.py", line 12, in main',
        "ValueError: second",
    ]
    found = record_of("\n".join(head + line for line in lines) + "\nINFO: something else\n")
    assert [block.text for block in found.exceptions] == ["RuntimeError: first", "ValueError: second"]
    assert [frame.function for frame in found.exceptions[0].frames] == ["run", "create_weights"]
    assert found.exceptions[0].frames[0].code == "load()"
    assert found.exceptions[1].link == "cause"


def test_a_header_that_is_repeated_is_no_prefix() -> None:
    text = f'Scheduler hit an exception: {MARKED}\n  File "/opt/sglang/a.py", line 1, in f\nKeyError: 1\n'
    records = [event for event in parse_events(read_log((text * 2).encode())) if isinstance(event, Traceback)]
    assert [record.header for record in records] == ["Scheduler hit an exception:"] * 2


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            "python3 -m sglang.launch_server --model-path /srv/m --tp 8 --speculative-ddtree-budget=32 --trust-remote-code --mem-fraction-static 0.8",
            {"model_path": "/srv/m", "tp_size": 8, "speculative_ddtree_budget": 32, "mem_fraction_static": 0.8},
        ),
        ("`sglang serve --model 'a b' --port 30000`", {"model_path": "a b", "port": 30000}),
        ("/opt/rel/sglang/launch_server.py --enable-metrics --tensor-parallel-size 4", {"tp_size": 4}),
        ("sglang serve --api-key sk-secret-secret", {"api_key": MASK}),
    ],
)  # fmt: skip
def test_a_command_that_starts_a_server(text: str, values: dict[str, object]) -> None:
    assert parse_command(text) == values


@pytest.mark.parametrize(
    "text",
    [
        "launch_server.py: error: unrecognized arguments: --tp 8",
        "usage: sglang serve [-h] [--tp TP]",
        "python -m vllm.entrypoints.openai.api_server --port 1",
        "process.cmdline()=['python3', '-m', 'sglang.launch_server', '--tp', '8']",
    ],
)
def test_no_command(text: str) -> None:
    assert parse_command(text) is None
