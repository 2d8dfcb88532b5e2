"""From records to the cause: chains, lives, votes over shuffled ranks, what CUDA says late, what may be forgotten."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_ops.diagnose import DiagnosisReport, LogLine, diagnose, fingerprint, read_log
from ddtree_ops.diagnose.events import Frame, Traceback, parse_events
from ddtree_ops.diagnose.tracebacks import CAUSE, DURING, ExceptionBlock, root_block

DATA = Path(__file__).parents[1] / "data"
MARK = "Traceback (most recent call last):"


def report_of(text: str | Sequence[str]) -> DiagnosisReport:
    lines = text.splitlines() if isinstance(text, str) else text
    return diagnose(LogLine(line, number) for number, line in enumerate(lines, 1))


def recorded(name: str) -> list[str]:
    """The first traceback of a recorded log, from its header to the exception's last line."""
    texts = [line.text for line in read_log((DATA / "logs" / name).read_bytes())]
    start = next(n for n, text in enumerate(texts) if text.endswith(MARK) and "Can not" not in text)
    end = next((n for n in range(start, len(texts)) if texts[n].startswith("[20") and n > start), len(texts))
    return [text for text in texts[start + 1 : end] if text.strip()]


TRACES = {
    "IndexError": recorded("cpu-badtoken.log"),
    "SafetensorError": recorded("cpu-corrupt.log"),
    "OutOfMemoryError": recorded("h200-oom-drafter-kv-pool.log"),
}


SEEDS = st.integers(0, 2**32)


def shuffled(texts: Sequence[Sequence[str]], choices: random.Random, burst: int) -> list[str]:
    """The lines of several processes mixed, each one's own order kept; ``burst`` lines at once at most."""
    left = [list(reversed(lines)) for lines in texts]
    found = []
    while any(left):
        lines = choices.choice([lines for lines in left if lines])
        for _ in range(choices.randint(1, burst)):
            if lines:
                found.append(lines.pop())
    return found


def ranked(rank: int, trace: Sequence[str]) -> list[str]:
    return [f"[2026-11-29 14:53:24 TP{rank}] Scheduler hit an exception: {MARK}", *trace]


@settings(max_examples=60)
@given(
    SEEDS,
    st.sampled_from(sorted(TRACES)),
    st.integers(2, 16),
    st.sampled_from([1, 3, 40]),
)
def test_ranks_that_fail_alike(seed: int, name: str, ranks: int, burst: int) -> None:
    alone = report_of(ranked(0, TRACES[name])).root
    report = report_of(
        shuffled([ranked(rank, TRACES[name]) for rank in range(ranks)], random.Random(seed), burst)
    )
    root = report.root
    assert root is not None and alone is not None
    assert (root.signature, root.title, root.fingerprint) == (alone.signature, alone.title, alone.fingerprint)
    assert root.count == ranks and len(root.ranks) == ranks
    assert root.traceback[0] == alone.traceback[0] and root.traceback[-1] == alone.traceback[-1]
    assert [item.signature for item in report.diagnoses] == [alone.signature]


@settings(max_examples=60)
@given(
    SEEDS,
    st.permutations(sorted(TRACES)),
    st.integers(5, 8),
    st.sampled_from([1, 3, 40]),
)
def test_one_rank_fails_otherwise(seed: int, names: list[str], most: int, burst: int) -> None:
    """The majority's exception and place are the cause, the other rank's is not lost."""
    main, other, _ = names
    traces = [ranked(rank, TRACES[main]) for rank in range(most)] + [ranked(most, TRACES[other])]
    random.Random(seed).shuffle(traces)
    report = report_of(shuffled(traces, random.Random(seed), burst))
    alone, second = report_of(ranked(0, TRACES[main])).root, report_of(ranked(0, TRACES[other])).root
    assert report.root is not None and alone is not None and second is not None
    assert report.root.fingerprint == alone.fingerprint and report.root.traceback[-1] == alone.traceback[-1]
    assert report.root.count == most
    assert second.signature in {item.signature for item in report.consequences}


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1, 3, 40]))
def test_chains_that_are_shuffled(seed: int, burst: int) -> None:
    """The place is sure where a second rank had begun before the first exception was named."""
    trace = [
        '  File "/opt/rel/sglang/srt/a.py", line 5, in inner', "    raise ValueError(shape)", "ValueError: shape 17", "", CAUSE, "",
        MARK, '  File "/opt/rel/sglang/srt/b.py", line 9, in outer', "    raise RuntimeError(name) from error", "RuntimeError: wrapped",
    ]  # fmt: skip
    lines = shuffled([ranked(rank, trace) for rank in range(8)], random.Random(seed), burst)
    root = report_of(lines).root
    assert root is not None
    assert root.title == "unknown failure: ValueError"
    first = lines.index("ValueError: shape 17")
    if sum(line.startswith("[2026") for line in lines[:first]) > 1:
        assert "inner (srt/a.py:5)" in root.explanation


@pytest.mark.parametrize(
    "label", ["[rank{}]: ", "(TP{} pid=40{}) ", "[default{}]:", "[2026-11-29 14:53:24 TP{}] "]
)
def test_labelled_lines_are_never_mixed(label: str) -> None:
    traces = []
    for rank in range(8):
        name = "IndexError" if rank == 3 else "SafetensorError"
        traces.append([label.format(rank, rank) + text for text in [MARK, *TRACES[name]]])
    rows = itertools.zip_longest(*traces)
    texts = [text for row in rows for text in row if text is not None]
    found = [
        event
        for event in parse_events(LogLine(t, n) for n, t in enumerate(texts, 1))
        if isinstance(event, Traceback)
    ]
    assert sorted(item.rank for item in found) == [f"TP{rank}" for rank in range(8)]
    for item in found:
        wanted = "IndexError" if item.rank == "TP3" else "SafetensorError"
        assert item.exceptions[0].type.rpartition(".")[2] == wanted
        assert len(item.exceptions[0].frames) == sum(text.startswith("  File") for text in TRACES[wanted])


def chain(*parts: tuple[str, str, str]) -> tuple[ExceptionBlock, ...]:
    return tuple(ExceptionBlock(kind, message, (), link) for kind, message, link in parts)


@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [
        (chain(("ValueError", "a", ""), ("RuntimeError", "b", "cause")), "ValueError"),
        (chain(("KeyError", "'a'", ""), ("RuntimeError", "b", "cause")), "KeyError"),
        (
            chain(("torch.OutOfMemoryError", "a", ""), ("Exception", "Capture failed: a", "during")),
            "torch.OutOfMemoryError",
        ),
        (chain(("KeyError", "'sm_121'", ""), ("RuntimeError", "no kernel", "during")), "RuntimeError"),
        (
            chain(
                ("AttributeError", "no x", ""), ("ValueError", "b", "during"), ("RuntimeError", "c", "during")
            ),
            "ValueError",
        ),
        (chain(("KeyError", "'weight'", ""), ("ValueError", "weight is missing", "during")), "KeyError"),
        (chain(("EOFError", "", ""), ("RuntimeError", "Rank 0 scheduler died", "during")), "RuntimeError"),
        (chain(("RuntimeError", "a", ""), ("SystemExit", "1", "during")), "RuntimeError"),
        (chain(("SystemExit", "1", ""), ("RuntimeError", "a", "during")), "RuntimeError"),
        (
            chain(("ExceptionGroup", "two", ""), ("ValueError", "a", "group"), ("TypeError", "b", "group")),
            "ValueError",
        ),
        (
            chain(("ValueError", "a", ""), ("ExceptionGroup", "x", "cause"), ("TypeError", "b", "group")),
            "TypeError",
        ),
    ],
)
def test_root_of_a_chain(blocks: tuple[ExceptionBlock, ...], wanted: str) -> None:
    root = root_block(blocks)
    assert root is not None and root.type == wanted


def test_the_fallback_that_failed_is_the_cause_in_a_log() -> None:
    report = report_of(
        f"[2026-11-29 14:53:24 TP0] Scheduler hit an exception: {MARK}\n"
        '  File "/opt/rel/sglang/srt/a.py", line 5, in find\n    return table[name]\n'
        "KeyError: 'fast'\n\n"
        f"{DURING}\n\n{MARK}\n"
        '  File "/opt/rel/sglang/srt/a.py", line 9, in slow\n    return build(shape)\n'
        "ValueError: shape 17 cannot be built\n"
    )
    assert report.root is not None
    assert report.root.title == "unknown failure: ValueError"


@pytest.mark.parametrize("prefix", ["", "[2026-11-29 14:53:24 TP0] "])
def test_an_exception_without_its_traceback(prefix: str) -> None:
    line = "RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0"
    report = report_of([prefix + line])
    assert report.root is not None and report.root.signature == "ddtree-graph-size"
    assert report.root.evidence[0].text == prefix + line


def test_an_unknown_exception_alone_is_told_only_where_the_server_does_not_go_on() -> None:
    line = "[2026-11-29 14:53:20] server_args=ServerArgs(model_path='/m')"
    failed = report_of([line, "plugin.errors.OddError: the moon is full"])
    assert failed.root is not None and failed.root.title == "unknown failure: OddError"
    after = '[2026-11-29 14:53:25] INFO:     192.0.2.1:1 - "POST /generate HTTP/1.1" 200 OK'
    assert report_of([line, "plugin.errors.OddError: the moon is full", after]).diagnoses == ()


CUDA = (
    "torch.AcceleratorError: CUDA error: unspecified odd failure\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
HEAD = f'[2026-11-29 14:53:24 TP0] Scheduler hit an exception: {MARK}\n  File "/opt/rel/sglang/srt/a.py", line 5, in f\n    x.cpu()\n'
ASSERT = "../aten/src/ATen/native/cuda/Odd.cu:1553: operator(): block: [{0},0,0], thread: [1,0,0] Assertion `odd < even` failed."


def test_cuda_reports_late() -> None:
    root = report_of(HEAD + CUDA).root
    assert root is not None
    assert "CUDA reports errors late" in root.explanation and "asynchronously" not in str(root.traceback)
    root = report_of("[2026-11-29 14:53:20] Environment: CUDA_LAUNCH_BLOCKING=1\n" + HEAD + CUDA).root
    assert root is not None and "CUDA_LAUNCH_BLOCKING=1 was set" in root.explanation


def test_the_line_of_the_kernel_is_the_better_evidence() -> None:
    asserts = "\n".join(ASSERT.format(n) for n in range(40))
    root = report_of(
        asserts + "\n" + HEAD + CUDA.replace("unspecified odd failure", "device-side assert triggered")
    ).root
    assert root is not None
    assert root.evidence[0].line == 1 and "Odd.cu:1553" in root.evidence[0].text
    assert "Odd.cu:1553" in root.explanation or "odd < even" in root.explanation


def crash(time: str, words: str, *, pid: int = 7) -> list[str]:
    return [
        f"[{time} TP0] Scheduler hit an exception: {MARK}",
        '  File "/opt/rel/sglang/srt/a.py", line 5, in ' + words.split()[0],
        f"ValueError: {words}",
        f"[{time}] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    ]


def start(time: str) -> str:
    return f"[{time}] server_args=ServerArgs(model_path='/m')"


def test_the_newest_failed_life_comes_first_and_names_the_others() -> None:
    lines = [start("2026-11-29 10:00:00"), *crash("2026-11-29 10:01:00", "first odd thing")]
    lines += [start("2026-11-29 11:00:00"), *crash("2026-11-29 11:01:00", "second odd thing")]
    lines += [start("2026-11-29 12:00:00"), "[2026-11-29 12:01:00] The server is fired up and ready to roll!"]
    report = report_of(lines)
    said = [item.traceback[-1] for item in report.diagnoses]
    assert said == ["ValueError: second odd thing", "ValueError: first odd thing"]
    assert "Earlier starts in these lines failed otherwise: ValueError" in report.diagnoses[0].explanation


def test_a_systemd_restart_parts_lives() -> None:
    def entry(number: int, text: str, source: str, pid: int) -> LogLine:
        return LogLine(text, number, f"2026-11-29T10:00:{number:02d}+00:00", source, pid)  # type: ignore[arg-type]

    texts = [
        *(("x.service: Started it", "systemd"),), ("Started x.service - sglang.", "systemd"),
        *((text, "process") for text in crash("2026-11-29 10:00:03", "first odd thing")),
        ("x.service: Main process exited, code=killed, status=9/KILL", "systemd"),
        ("x.service: Scheduled restart job, restart counter is at 1.", "systemd"), ("Started x.service - sglang.", "systemd"),
        (start("2026-11-29 10:00:12"), "process"), *((text, "process") for text in crash("2026-11-29 10:00:13", "second odd thing")),
    ]  # fmt: skip
    report = diagnose(entry(n, text, source, 7 + n // 9) for n, (text, source) in enumerate(texts, 1))
    assert [item.traceback[-1] for item in report.diagnoses] == [
        "ValueError: second odd thing",
        "ValueError: first odd thing",
    ]
    assert "systemd-exit" in {item.signature for item in report.consequences}


def test_a_kill_after_the_own_kill_is_no_oom() -> None:
    lines = [
        LogLine(text, n, f"2026-11-29T10:00:{n:02d}+00:00", "process", 7)
        for n, text in enumerate(crash("2026-11-29 10:00:01", "an odd thing"), 1)
    ]
    lines.append(
        LogLine(
            "x.service: Main process exited, code=killed, status=9/KILL",
            6,
            "2026-11-29T10:00:06+00:00",
            "systemd",
            1,
        )
    )
    report = diagnose(lines)
    assert report.root is not None and report.root.signature == "unknown"
    assert "systemd-exit" in {item.signature for item in report.consequences}


@pytest.mark.parametrize(("seconds", "leads"), [(5, True), (50, True), (400, False)])
def test_a_fault_of_the_gpu_is_the_cause_only_shortly_before_the_failure(seconds: int, leads: bool) -> None:
    at = 600 - seconds
    lines = [
        LogLine(
            "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",
            1,
            f"2026-11-29T10:{at // 60:02d}:{at % 60:02d}+00:00",
            "kernel",
        )
    ]
    lines += [
        LogLine(text, n, "2026-11-29T10:10:00+00:00", "process", 7)
        for n, text in enumerate(crash("2026-11-29 10:10:00", "an odd thing"), 2)
    ]
    report = diagnose(lines)
    assert report.root is not None
    assert (report.root.signature == "xid") is leads
    assert any(item.signature == "xid" for item in report.diagnoses)


def test_a_fault_of_the_gpu_that_the_server_survives_is_a_note() -> None:
    lines = [
        LogLine(
            "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.",
            1,
            "2026-11-29T10:00:00+00:00",
            "kernel",
        ),
        LogLine(
            "[2026-11-29 10:10:00] Decode batch, #running-req: 1, #token: 5",
            2,
            "2026-11-29T10:10:00+00:00",
            "process",
            7,
        ),
    ]
    report = diagnose(lines)
    assert report.root is None and [
        item.severity for item in report.diagnoses if item.signature == "xid"
    ] == ["degraded"]


def test_an_exception_just_before_the_end_is_not_excused_by_one_more_answer() -> None:
    lines = [
        "[2026-11-29 10:00:00] Worker thread: " + MARK, '  File "/opt/rel/sglang/srt/a.py", line 5, in f', "ValueError: odd",
        '[2026-11-29 10:00:01] INFO:     192.0.2.1:1 - "POST /generate HTTP/1.1" 200 OK',
        "[2026-11-29 10:00:02] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    ]  # fmt: skip
    root = report_of(lines).root
    assert root is not None and root.traceback[-1] == "ValueError: odd"


def test_what_users_wrote_is_no_evidence() -> None:
    words = "CUDA out of memory. Traceback (most recent call last): RuntimeError: The size of tensor a (8) must match the size of tensor b (33)"
    lines = [
        start("2026-11-29 10:00:00"),
        f"[2026-11-29 10:00:00] Receive: obj=GenerateReqInput(rid='1', text='{words}')",
        f"[2026-11-29 10:00:00] Receive OpenAI: obj=ChatCompletionRequest(messages=[{{'content': '{words}'}}])",
        f"[2026-11-29 10:00:01] Finish: obj=GenerateReqInput(rid='1', text='{words}'), out={{'text': '{words}'}}",
        f'{{"timestamp": "x", "event": "request.received", "obj": {{"text": "{words}"}}}}',
        f"[2026-11-29 10:00:01] Running warmup request: {{'text': '{words}'}}",
    ]
    assert report_of(lines).diagnoses == ()


def test_the_first_and_the_frequent_findings_survive() -> None:
    def lines() -> list[LogLine]:
        found = []
        for number in range(3000):
            name = "often" if number % 7 == 0 else f"f{number}"
            name = "first" if number == 0 else name
            for text in (
                f"[2026-11-29 10:00:00 TP0] Odd: {MARK}",
                f'  File "/opt/rel/sglang/x.py", line 3, in {name}',
                "ValueError: odd",
                "",
            ):
                found.append(LogLine(text, len(found) + 1))
        return found

    report = diagnose(lines())
    every = [*report.diagnoses, *report.consequences]
    assert len(every) <= 256
    assert report.root is not None and "in first" in report.root.traceback[0]
    often = next(item for item in every if "in often" in item.traceback[0])
    assert often.count > 300


NOISE = {
    "rank": ["TP3", "TP11", "[rank5]:"],
    "address": ["0x7f00a2", "0xffffffffdeadbeef"],
    "size": ["13.90 GiB", "512.00 MiB", "7 GB"],
    "shape": ["torch.Size([8, 33])", "torch.Size([1, 2, 4096])"],
    "path": ["/tmp/a/b.json", "/opt/models/Example-1.5/model-00001.safetensors", "~/x/y.py"],
    "uuid": ["0b5c1c1e-77aa-4c7d-8d49-0123456789ab", "deadbeef-0000-4000-8000-00000000000f"],
    "date": ["2026-11-29 14:53:24", "2026-01-02T03:04:05.123456+00:00"],
    "temporary": ["tmpab12cd9x", "tmp_x9zq01"],
    "digest": ["3f786850e387550fdab836ed7e6dc881", "a7545240d81548039ca8b4729857737b"],
    "python": ["/usr/lib/python3.11/x.py", "/usr/lib/python3.12/x.py"],
}


@given(st.lists(st.sampled_from(sorted(NOISE)), min_size=1, max_size=5), st.data())
def test_fingerprint_leaves_out_what_changes(kinds: list[str], data: st.DataObject) -> None:
    def drawn(number: int) -> str:
        words = " and ".join(data.draw(st.sampled_from(NOISE[kind])) for kind in kinds)
        frame = Frame(f"/opt/{number}/sglang/srt/x.py", number, "forward")
        return fingerprint("ValueError", f"bad value {number} of {words} in it", frame)

    assert drawn(1) == drawn(2048)


@given(
    st.sampled_from(["f", "g", "<lambda>"]),
    st.sampled_from(["f", "g", "<lambda>"]),
    st.sampled_from(["A", "B"]),
    st.sampled_from(["A", "B"]),
)
def test_fingerprint_parts_functions_and_types(f: str, g: str, a: str, b: str) -> None:
    one = fingerprint(f"{a}Error", "x", Frame("/a/sglang/x.py", 1, f))
    other = fingerprint(f"{b}Error", "x", Frame("/a/sglang/x.py", 2, g))
    assert (one == other) == ((f, a) == (g, b))


def test_a_worker_that_was_killed_says_when_and_what_is_missing() -> None:
    report = diagnose(read_log((DATA / "logs/cpu-killsched.log").read_bytes()))
    assert report.root is not None and report.root.signature == "child-died"
    assert "after it had said that it was ready" in report.root.explanation
    assert "No line of the kernel is among what was read" in report.root.explanation


@settings(max_examples=30)
@given(SEEDS, st.sampled_from([1, 3, 40]), st.sampled_from(["uncaught", "headless", "noisy", "cuda"]))
def test_shuffles_as_they_come(seed: int, burst: int, kind: str) -> None:
    """Children without a prefix, a log whose begin is missing, other lines in between, CUDA's help lines."""
    trace = TRACES["IndexError"]
    if kind == "cuda":
        trace = ['  File "/opt/rel/sglang/srt/a.py", line 5, in f', "    x.cpu()", *CUDA.splitlines(), ""]
    alone = report_of(ranked(0, trace)).root
    traces = [ranked(rank, trace) for rank in range(8)]
    if kind == "uncaught":
        traces = [[f"Process SpawnProcess-{rank}:", MARK, *trace] for rank in range(8)]
    elif kind == "headless":
        traces = [trace for _ in range(8)]
    elif kind == "noisy":
        traces.append(["[2026-11-29 14:53:24 TP0] Decode batch, #running-req: 1"] * 6)
        traces.append(['INFO:     192.0.2.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable'] * 4)
    root = report_of(shuffled(traces, random.Random(seed), burst)).root
    assert root is not None and alone is not None
    assert (root.fingerprint, root.count) == (alone.fingerprint, 8)


@settings(max_examples=20)
@given(SEEDS, st.sampled_from([1, 3, 40]))
def test_a_tie_keeps_both_exceptions(seed: int, burst: int) -> None:
    """Half of the ranks fail otherwise: places may be mistaken, what was raised may not."""
    names = ("IndexError", "SafetensorError")
    traces = [ranked(rank, TRACES[names[rank % 2]]) for rank in range(8)]
    report = report_of(shuffled(traces, random.Random(seed), burst))
    said = {item.traceback[-1] for item in (*report.diagnoses, *report.consequences) if item.traceback}
    assert said == {TRACES[name][-1] for name in names}


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", [1]),
        ("terminate called after throwing an instance of 'c10::Error'\n  what():  something odd happened", [1, 2]),
        ('/tmp/x.cu(12): error: identifier "foo" is undefined', [1]),
        ("[2026-11-29 14:53:24 TP0] Fatal Python error: Aborted", [1]),
        (f'{MARK}\n  File "/opt/sglang/a.py", line 3, in f\n    g()\n  File "/opt/sglang/b.py", line 4, in g', [4]),
        (f'  {MARK}\n    File "/opt/sglang/a.py", line 3, in f\n  RuntimeError: odd', [3]),
    ],
)  # fmt: skip
def test_evidence_is_what_stands_in_the_log(text: str, evidence: list[int]) -> None:
    lines = text.split("\n")
    root = report_of(text).root
    assert root is not None
    assert [item.line for item in root.evidence] == evidence
    assert all(item.text and item.text.strip() in lines[item.line - 1] for item in root.evidence)


def test_a_kernels_assertion_is_told_once() -> None:
    line = "/x/IndexKernel.cu:111: operator(): block: [0,0,0], thread: [33,0,0] Assertion `a < b` failed."
    report = report_of([line, line.replace("33", "34")])
    assert [item.signature for item in report.diagnoses] == ["device-assert"] and not report.consequences


def test_a_line_in_backquotes_is_quoted_unless_it_is_an_exception() -> None:
    said = "OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376. See `num_stages`."
    assert report_of(said).root is not None
    assert report_of(f"I saw `{said}` yesterday").root is None


COMMAND = "python -m sglang.launch_server --tp 8 --speculative-algorithm DDTREE --speculative-ddtree-budget 32 --speculative-num-draft-tokens 8"


@pytest.mark.parametrize("first", [True, False])
def test_settings_of_a_command_beside_the_log(first: bool) -> None:
    trace = f"""[2026-11-29 14:53:24 TP3] Scheduler hit an exception: {MARK}
  File "/opt/sglang/srt/model_executor/cuda_graph_runner.py", line 9, in replay_prepare
    self.mask.copy_(mask)
RuntimeError: The size of tensor a (24) must match the size of tensor b (99) at non-singleton dimension 0
[2026-11-29 14:53:25] Received sigquit from a child process."""
    report = report_of(f"{COMMAND}\n{trace}" if first else f"{trace}\n{COMMAND}")
    assert report.root is not None
    assert "24 = 3 x block_size 8, 99 = 3 x (budget 32 + 1)" in report.root.explanation
    assert report.facts.learned >= {"block_size", "budget", "tensor_parallel", "algorithm"}


def test_what_no_signature_explains_is_read_again_with_a_later_command() -> None:
    text = f"""[2026-11-29 14:53:24 TP3] Scheduler hit an exception: {MARK}
  File "/opt/sglang/srt/layers/x.py", line 9, in f
RuntimeError: Expected size 8 but got size 33
"""
    alone, together = report_of(text).root, report_of(f"{text}\n{COMMAND}").root
    assert alone is not None and together is not None
    assert "budget + 1" not in alone.explanation
    assert "(budget + 1) 33" in together.explanation


def test_the_servers_own_arguments_go_before_a_command() -> None:
    dump = "[2026-11-29 14:53:00] server_args=ServerArgs(model_path='/m', tp_size=2)"
    report = report_of([dump, COMMAND])
    assert (report.facts.tensor_parallel, report.facts.budget) == (2, 32)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: User-specified context_length (9) is greater than the derived context_length (8). This may lead to CUDA errors.",
        "torch.SomeError: This may lead to incorrect outputs or CUDA errors.",
    ],
)
def test_a_word_about_cuda_errors_is_none(text: str) -> None:
    root = report_of(text).root
    assert root is not None and "late" not in root.explanation
