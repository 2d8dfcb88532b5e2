"""How a diagnosis reads: order of its parts, a chain of a trace, letters that a terminal can show."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ddtree_ops.diagnose.api import DiagnosisReport, diagnose_stream, merged
from ddtree_ops.diagnose.facts import ServiceFacts
from ddtree_ops.diagnose.trace import Trace, TraceStep
from ddtree_ops.report.diagnosis import print_diagnosis, trace_lines
from ddtree_ops.results import Verdict

LOG = b"""[2026-11-29 10:00:00 TP0] Load weight begin. avail mem=21.72 GB
[2026-11-29 10:00:05 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/srt/model_executor/cuda_graph_runner.py", line 117, in foreach_copy
    torch._foreach_copy_(dsts, srcs)
RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0

[2026-11-29 10:00:05] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""
TRACE = Trace(
    (
        TraceStep("flag", "sglang/srt/server_args.py", 5405, "--speculative-num-draft-tokens"),
        TraceStep("use", "sglang/srt/runner.py", 63, "self.num_tokens = " + "x" * 90),
        TraceStep("crash", "sglang/srt/runner.py", 117, "copy(a, b)"),
        TraceStep("absent", "sglang/srt/runner.py", 0, "--budget: runner.py never reads it"),
    ),
    "release abc",
)


@pytest.fixture(scope="module")
def report() -> DiagnosisReport:
    facts = ServiceFacts(block_size=8, budget=32, algorithm="DDTREE", patched=False, host="ct200")
    found = diagnose_stream(LOG, facts, source="ct200")
    return replace(
        found, trace=TRACE, patch="it lacks the patch", seen="not seen before here", notes=("another run …",)
    )


def shown(report: DiagnosisReport, *, encoding: str = "utf-8", **more) -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_diagnosis(Console(file=file, width=80, highlight=False), report, **more)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


def test_the_one_sentence_comes_first_and_what_follows_is_in_order(report: DiagnosisReport) -> None:
    lines = shown(report, host="ct200")
    starts = [
        "ct200: ddtree-graph-size on TP0: ", "  note: another run …", "  8 = 1 x block_size 8, 33 = 1 x (budget 32 + 1)",
        "  trace, read in release abc:", "       server_args.py:5405  --speculative", "    -> runner.py:63",
        "    -> runner.py:117", "    !! --budget", "  patch: it lacks", "  remedy: ", "  not seen before here", "    line 5: ",
        "  then: ",
    ]  # fmt: skip
    places = [next(number for number, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert places[0] == 0


def test_a_chain_is_short_and_names_the_place_of_the_failure() -> None:
    head, flag, use, crash, absent = trace_lines(TRACE)
    assert head == "trace, read in release abc:"
    assert flag.index("--spec") == use.index("self.num_tokens") == crash.index("copy(a")
    assert use.endswith("x...") and len(use) < 100
    assert crash.endswith("copy(a, b)  <- it failed here")
    assert absent == "  !! --budget: runner.py never reads it"
    assert trace_lines(Trace(note="no tree")) == []


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_terminal_lacks_are_spelled(report: DiagnosisReport, encoding: str) -> None:
    lines = shown(report, encoding=encoding, host="höst" if encoding == "latin-1" else "host")
    assert any("another run ..." in line for line in lines)


def test_verbose_shows_the_traceback_and_each_consequence(report: DiagnosisReport) -> None:
    plain, full = "\n".join(shown(report)), "\n".join(shown(report, verbose=True))
    assert "cuda_graph_runner.py" not in plain.replace("-> ", "") and 'File "/srv/sglang' in full
    assert "SIGQUIT received" not in plain and "SIGQUIT received" in full


def test_several_reports_are_one_document_the_earliest_failure_first(report: DiagnosisReport) -> None:
    later = diagnose_stream(LOG.replace(b" 10:00:0", b" 11:00:0"), report.facts, source="b300")
    nothing = diagnose_stream(b"", source="empty")
    document = merged([nothing, later, report])
    assert document["verdict"] == "fail"
    assert [item["source"] for item in document["diagnoses"]] == ["ct200", "b300"]
    assert document["headline"].startswith("ct200: ddtree-graph-size")
    assert (document["patch"], document["trace"]) == (report.patch, [step.to_json() for step in TRACE.steps])
    assert document["notes"] == ["ct200: another run …"]
    assert document["searched"]["from"] == "2026-11-29 10:00:00"
    assert merged([])["verdict"] == "inconclusive" == str(nothing.verdict)
    assert nothing.verdict is Verdict.INCONCLUSIVE and "nothing to judge by" in nothing.headline()
