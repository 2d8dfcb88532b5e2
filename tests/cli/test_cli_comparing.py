"""``bench compare``: two reports on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree_ops.report.write import write_report
from ddtree_ops.results import CheckResult, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport


def kept(folder: Path, rate: float) -> Path:
    figure = Figure(
        "output_rate", rate, "tokens/s", "own", samples=64, spread=1.0, labels={"concurrency": "8"}
    )
    check = CheckResult("bench.baseline-c8", Verdict.PASS, "measured", figures=(figure,))
    target = TargetReport("ct200", "ct200", "k26", checks=(check,))
    write_report(
        RunReport("bench", folder.name, "2026-11-30T06:30:00Z", complete=True, targets=(target,)), folder
    )
    return folder


def test_two_runs_are_compared_on_the_terminal_and_as_a_page(
    typed: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = kept(tmp_path / "one", 1000.0), kept(tmp_path / "two", 500.0)
    ended = typed("bench", "compare", str(first), str(second), "--html", str(tmp_path / "compared.html"))
    assert (ended.code, "worse: output_rate" in ended.out) == (0, True), ended
    page = (tmp_path / "compared.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "output_rate" in page
    assert "worse" in page
