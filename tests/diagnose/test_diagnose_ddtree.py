"""DDTREE on a real GPU (one H200, sglang 0.5.11, CUDA graphs), as its log was: the story's crash, the refusal, a good run.

The unpatched tree was started twice: with ``DDTREE_SKIP_SELF_CHECK=1``, so that it serves and dies at the first request,
and without, so that the plugin refuses. Machine paths became ``/srv``; nothing is cut.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from ddtree_ops.diagnose import DiagnosisReport, diagnose_stream, read_log
from ddtree_ops.diagnose.api import diagnose
from ddtree_ops.diagnose.library import load_library
from ddtree_ops.results import Verdict

DATA = Path(__file__).parents[1] / "data/gpu"
NAMES = ("story", "refused", "healthy")


def stored(name: str) -> bytes:
    plain = DATA / f"h200-ddtree-{name}.log"
    return plain.read_bytes() if plain.exists() else gzip.decompress(Path(f"{plain}.gz").read_bytes())


def judged(name: str) -> DiagnosisReport:
    return diagnose_stream(stored(name), library=load_library())


def test_the_crash_of_the_first_request_is_explained_and_not_the_warning_before_it() -> None:
    report = judged("story")
    assert report.verdict is Verdict.FAIL and report.root is not None
    assert [item.signature for item in report.diagnoses] == [
        "ddtree-graph-size",
        "chat-template",
        "ddtree-check-skipped",
    ]
    assert (
        "8 = 1 x block_size 8, 33 = 1 x (budget 32 + 1) [settings read from the log]"
        in report.root.explanation
    )
    assert "size of tensor a (8)" in report.root.evidence[0].text
    assert [item.signature for item in report.consequences] == ["sched-exc", "sigquit"]
    skipped = report.diagnoses[-1]
    assert "DDTREE_SKIP_SELF_CHECK=1" in skipped.explanation and skipped.severity == "degraded"
    assert "before anything was served" not in str(report.to_json())


def test_the_refusal_of_the_plugin_names_the_patch() -> None:
    report = judged("refused")
    assert report.verdict is Verdict.FAIL and report.root is not None
    assert [item.signature for item in report.diagnoses] == ["ddtree-unpatched", "chat-template"]
    assert "hold 8 tokens a request and a tree sends 33: patch 0001 is not in" in report.root.explanation
    assert "before anything was served" in report.root.explanation
    assert "ddtree-ops patch check" in report.root.remedy
    assert [item.signature for item in report.consequences] == ["sched-exc", "sigquit"]


def test_a_good_run_has_nothing_fatal_and_the_figures_of_the_tree() -> None:
    report = judged("healthy")
    assert report.verdict is Verdict.PASS
    assert [item.signature for item in report.diagnoses] == ["chat-template"]
    figures = report.to_json()["figures"]
    assert figures["ready"] == ["2026-11-30 00:25:09"]
    assert figures["last"]["accept_len"]["value"] == pytest.approx(2.91, abs=0.01)
    assert figures["last"]["cuda_graph_lines"]["without"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_read_whole_and_as_a_stream_agree(name: str) -> None:
    whole, stream = diagnose(read_log(stored(name)), library=load_library()), judged(name)
    assert [item.signature for item in whole.diagnoses] == [item.signature for item in stream.diagnoses]
    assert whole.verdict is stream.verdict


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_is_left(name: str) -> None:
    raw = stored(name).decode()
    assert set(re.findall(r"(?<![\w.:/<>-])/([A-Za-z0-9_.-]+)/", raw)) <= {"srv", "v1"}
    assert set(re.findall(r"\b\d+\.\d+\.\d+\.\d+\b", raw)) <= {"127.0.0.1"}
