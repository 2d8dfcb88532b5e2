"""What ``bench`` refuses before a host is asked, what it says to type again, and what it tells of its sample."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import ddtree_ops.lint
import ddtree_ops.runtime
from ddtree_ops.checks.bench.points import Configuration
from ddtree_ops.checks.bench.sampling import Sampled
from ddtree_ops.cli import benching
from ddtree_ops.cli.app import app
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.errors import ConfigError, ExitCode, UsageError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Speculative, Target
from ddtree_ops.lint import Finding, Severity
from ddtree_ops.playbook import bench
from ddtree_ops.report.write import write_report
from ddtree_ops.results import CheckResult, Event, EventKind, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

LAB = str(Path(__file__).resolve().parents[2] / "inventories/lab.yaml")
SERVICE = Service(
    name="s",
    unit="s.service",
    runtime="r",
    venv="/v",
    model="/m",
    drafter="/d",
    speculative=Speculative(budget=32, topk_cap=8),
)
TARGET = Target(host=Host(name="h", services={"s": SERVICE}), service=SERVICE, runtime=RuntimeSpec(name="r"))
OPTIONS = bench.BenchOptions(budgets=(16, 4096), baseline=False, dflash=False)


def bench_typed(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[Any, list[Any]]:
    """``bench ct200 ...``: how it ended, and what was to be measured; no host is to be asked."""
    measured: list[Any] = []
    monkeypatch.setattr(benching, "open_session", lambda target: pytest.fail("a host was asked"))
    monkeypatch.setattr(benching, "_measure", lambda *given, **more: measured.append(more))
    monkeypatch.setattr(bench, "refuse_what_lint_refuses", lambda *given, **more: None)
    done = CliRunner().invoke(app, ["bench", "ct200", "-i", LAB, *argv])
    return done.exception, measured


# ------------------------------------------------------------------------------------------ the report of another


@pytest.mark.parametrize(
    ("command", "same", "resume"), [("bench", True, True), ("bench", False, False), ("validate", True, False)]
)
def test_a_folder_with_a_report_is_not_written_over(monkeypatch, tmp_path, command, same, resume):
    options: dict[str, Any] = {}
    monkeypatch.setattr(bench.BenchOptions, "to_json", lambda self, targets: {"requests": 32})
    options = {"requests": 32 if same else 5}
    write_report(RunReport(command, "1", "now", complete=True, options=options), tmp_path)
    before = (tmp_path / "report.json").read_bytes()
    error, measured = bench_typed(monkeypatch, "--yes", "--report-dir", str(tmp_path))
    assert isinstance(error, UsageError)
    assert (f"--resume {tmp_path}" in error.hint) is resume
    assert "another folder" in error.hint
    assert ((tmp_path / "report.json").read_bytes(), measured) == (before, [])


def test_one_that_cannot_be_read_is_not_either_and_a_folder_without_one_is_taken(monkeypatch, tmp_path):
    (tmp_path / "report.json").write_text("{")
    error, measured = bench_typed(monkeypatch, "--yes", "--report-dir", str(tmp_path))
    assert isinstance(error, UsageError)
    (tmp_path / "report.json").rename(tmp_path / "other.json")
    error, measured = bench_typed(monkeypatch, "--yes", "--report-dir", str(tmp_path))
    assert (error, len(measured)) == (None, 1)


@pytest.mark.parametrize("yes", [True, False])
def test_to_go_on_the_same_is_typed_again_with_its_consent(monkeypatch, tmp_path, yes):
    monkeypatch.setattr(benching, "_confirm", lambda *given, **more: None)
    error, (measured,) = bench_typed(
        monkeypatch, *(["--yes"] if yes else []), "--report-dir", str(tmp_path), "--set", "port=1234"
    )
    assert error is None
    assert measured["safety"].same_again("ct200").endswith(f"--resume {tmp_path}{' --yes' if yes else ''}")
    assert measured["safety"].lint_of("ct200") == "ddtree-ops lint ct200 --set port=1234"


# ----------------------------------------------------------------------------------------------------------- lint


def refused_by_lint(monkeypatch: pytest.MonkeyPatch, severity: Severity) -> list[str]:
    """What was linted, by a lint that has something against budgets of 4096."""
    linted: list[str] = []

    def lint(target: Target, facts: str) -> tuple[Finding, ...]:
        speculative = target.service.speculative
        assert (facts, speculative is not None) == ("facts of r", True)
        linted.append(str(speculative.budget))
        bad = Finding("overlay-refuses", severity, "more than 65536 candidates", "", "", "lower it")
        return (bad,) if speculative.budget == 4096 else ()

    monkeypatch.setattr(ddtree_ops.runtime, "build", lambda runtime, progress=None: runtime.name)
    monkeypatch.setattr(ddtree_ops.lint, "facts_of", lambda built: f"facts of {built}")
    monkeypatch.setattr(ddtree_ops.lint, "lint", lint)
    return linted


def test_what_lint_refuses_is_refused_before_the_first_start_with_the_command_that_shows_it(monkeypatch):
    linted = refused_by_lint(monkeypatch, Severity.ERROR)
    starts = bench.starts_needed([TARGET], OPTIONS)
    safety = Safety(command="bench", lint="ddtree-ops lint {host} --set port=1")
    with pytest.raises(ConfigError) as raised:
        bench.refuse_what_lint_refuses([TARGET], starts, safety=safety)
    error = raised.value
    assert (error.exit_code, linted) == (ExitCode.CONFIG, ["16", "4096"])
    (line,) = error.details
    assert line.startswith("h ddtree-b4096-k8: overlay-refuses: ")
    assert "more than 65536 candidates" in line
    assert error.hint == (
        "ddtree-ops lint h --set port=1 --set speculative.algorithm=DDTREE --set speculative.budget=4096 "
        "--set speculative.topk_cap=8"
    )
    assert error.state == "nothing was changed"


def test_a_warning_and_what_is_not_started_are_no_matter(monkeypatch):
    linted = refused_by_lint(monkeypatch, Severity.WARN)
    bench.refuse_what_lint_refuses([TARGET], bench.starts_needed([TARGET], OPTIONS), safety=Safety())
    refused_by_lint(monkeypatch, Severity.ERROR)
    bench.refuse_what_lint_refuses([TARGET], {"h": ()}, safety=Safety())
    assert linted == ["16", "4096"]


def test_it_is_linted_before_anybody_is_asked(monkeypatch):
    refused_by_lint(monkeypatch, Severity.ERROR)
    with pytest.raises(ConfigError):
        benching._confirm([TARGET], OPTIONS, None, safety=Safety(), yes=True)


# ------------------------------------------------------------------------------------------------ what is told of it


def test_what_its_sample_says_is_told_as_its_own_phase(monkeypatch):
    """An event of a phase that nobody ends stays on a terminal to the end."""
    told: list[Event] = []
    book = bench._Book(RunReport("bench", "1", "now"), lambda report: None)
    one = bench._Target(TARGET, (), OPTIONS, book, lambda _: None, told.append, Safety())  # type: ignore[arg-type]

    def sampled(*given: Any, report: Any, **more: Any) -> Sampled:
        report(Event(EventKind.PROGRESS, "h", "validate: ", "the host applies the template"))
        return Sampled((), "none")

    monkeypatch.setattr(bench, "take_sample", sampled)
    one._sample(SimpleNamespace(), TARGET, Configuration("dflash"), None)  # type: ignore[arg-type]
    assert {event.phase for event in told} == {bench.PHASE}
    assert "dflash, the host applies the template" in [event.message for event in told]


def test_the_fastest_is_named_of_a_whole_run_only():
    rate = {"name": "output_rate", "unit": "tokens/s", "source": "own", "labels": {"concurrency": "1"}}
    checks = tuple(
        CheckResult(f"bench.{name}-c1", Verdict.PASS, "", figures=(Figure(value=value, **rate),))  # type: ignore[arg-type]
        for name, value in (("baseline", 1.0), ("dflash", 2.0))
    )
    found = TargetReport("h", "h", "s", checks=checks)
    whole = bench._with_best(found, True)
    assert whole.facts["recommended"] == {"1": "dflash"}
    assert "recommended" not in bench._with_best(whole, False).facts
    (line,) = benching._recommendations(RunReport("bench", "1", "now", targets=(whole,)))
    assert line == "h: most tokens/s at concurrency 1: dflash"


def test_a_run_is_not_compared_with_itself(tmp_path):
    write_report(RunReport("bench", "1", "now", targets=(TargetReport("h", "h", "s"),)), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["id"] == "1"
    with pytest.raises(UsageError, match="both are one run, bench 1"):
        benching.compare(tmp_path, tmp_path / "report.json")
