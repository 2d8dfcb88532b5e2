"""How a run goes over steps and hosts; sessions are real, with agents on this machine, the steps are not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.validation.acceptance import HISTORY
from ddtree_ops.checks.validation.lossless import BASELINE, GOLDEN
from ddtree_ops.checks.validation.run import Validation
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.drift import DriftReport, Finding, Severity
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    HealthTimeout,
    Inconclusive,
    LockHeld,
    OpsError,
    UnreachableError,
    UsageError,
)
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook import nightly
from ddtree_ops.playbook.models import Bench, Deploy, Journal, Plain, Playbook, Step, Trend, Validate
from ddtree_ops.playbook.nightly import (
    Wishes,
    drift_results,
    exit_code,
    flags_digest,
    journal_since,
    parts_of,
    run_nightly,
    told,
)
from ddtree_ops.playbook.trend import Store
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.results import RUN_END, CheckResult, Event, Figure, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

STEPS: tuple[Step, ...] = (Plain(kind="doctor"), Plain(kind="drift"), Validate(), Journal(), Trend())
NIGHT = Playbook(name="nightly", steps=STEPS)


def _targets(root: Path, names: str) -> list[Target]:
    service = Service(name="s", unit="t.service", runtime="r", venv="/v", model="/m")
    return [
        Target(
            host=Host(name=name, deploy_root=str(root / name), services={"s": service}),
            service=service,
            runtime=RuntimeSpec(name="r"),
        )
        for name in names.split()
    ]


class Desk:
    """Runs a nightly whose steps do what they were told: ``desk.says["drift", "a"]`` is called, or raised."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.says: dict[tuple[str, str], Any] = {}
        self.done: list[tuple[str, str]] = []
        self.kept: list[RunReport] = []
        self.events: list[Event] = []
        self.guard = threading.Lock()
        for kind in ("doctor", "drift", "validate", "journal", "trend"):
            monkeypatch.setattr(nightly._Night, f"_{kind}", self._step(kind))

    def _step(self, kind: str) -> Callable[..., None]:
        def step(night: Any, deployment: Deployment, step: Step) -> None:
            host = deployment.target.host.name
            with self.guard:
                self.done.append((host, kind))
            said = self.says.get((kind, host), Verdict.PASS)
            with deployment.frame.phase(kind):
                if callable(said):
                    said(deployment)
                elif isinstance(said, Exception):
                    raise said
                else:
                    night._judge(deployment, [CheckResult(f"{kind}.it", said, "so it is", hint="look")])

        return step

    def connect(self, target: Target) -> Session:
        if target.host.name.startswith("gone"):
            raise UnreachableError("refused the connection", hint="ssh gone true")
        return connect_local(target.host.name)

    def run(self, names: str, playbook: Playbook = NIGHT, **more: Any) -> tuple[RunReport, ExitCode]:
        return run_nightly(
            playbook,
            _targets(self.root, names),
            store=Store(self.root / "history", "lab"),
            connect=self.connect,
            report=self.events.append,
            keep=self.kept.append,
            inventory="lab",
            **more,
        )

    def history(self, host: str) -> list[str]:
        return [path.name for path in (self.root / "history/lab" / host / "s").glob("*.json")]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def verdicts(report: RunReport) -> dict[str, str]:
    return {target.target: target.verdict.value for target in report.targets}


def checks(report: RunReport, host: str) -> dict[str, str]:
    (target,) = [one for one in report.targets if one.target == host]
    return {check.name: check.verdict.value for check in target.checks}


def test_all_steps_on_all_hosts_and_a_line_in_the_history_of_each(desk: Desk) -> None:
    report, code = desk.run("a b")
    assert code is ExitCode.OK
    assert (report.complete, report.command, report.inventory) == (True, "nightly", "lab")
    assert verdicts(report) == {"a": "pass", "b": "pass"}
    kinds = [step.kind for step in STEPS]
    assert [kind for host, kind in desk.done if host == "a"] == kinds
    assert report.options["steps"] == kinds
    assert desk.history("a") == desk.history("b") == [f"{report.id}.json"]
    ends = [(event.host, event.message) for event in desk.events if event.phase == RUN_END]
    assert ends == [("a", "pass"), ("b", "pass")]


def test_a_report_is_kept_after_every_step_and_is_whole_only_at_the_end(desk: Desk) -> None:
    report, _ = desk.run("a")
    assert desk.kept[-1] == report
    assert [one.complete for one in desk.kept] == [False] * (len(desk.kept) - 1) + [True]
    assert {one.verdict.value for one in desk.kept[:-1]} == {"inconclusive"}
    counts = [len(one.targets[0].checks) for one in desk.kept]
    assert counts == sorted(counts)
    assert set(counts) == set(range(len(STEPS) + 1))
    assert all(RunReport.from_json(one.to_json()) == one for one in desk.kept)


def test_what_fails_on_one_host_ends_neither_its_steps_nor_the_others(desk: Desk) -> None:
    desk.says["drift", "a"] = Verdict.FAIL
    desk.says["validate", "a"] = HealthTimeout("no answer in 60 s", details=("last seen: loading",))
    report, code = desk.run("a gone b")
    assert [kind for host, kind in desk.done if host == "a"] == [step.kind for step in STEPS]
    assert verdicts(report) == {"a": "fail", "gone": "fail", "b": "pass"}
    assert code is ExitCode.UNREACHABLE
    found = checks(report, "a")
    assert found == {
        "doctor.it": "pass",
        "drift.it": "fail",
        "validate": "fail",
        "journal.it": "pass",
        "trend.it": "pass",
    }
    assert [event.message for event in desk.events if event.phase == RUN_END] == [
        "fail: drift.it, validate",
        "fail",
        "pass",
    ]
    failed = next(one for one in report.targets[0].checks if one.name == "validate")
    assert (failed.facts["exit_code"], failed.evidence[0].text) == (3, "last seen: loading")
    assert failed.hint
    (error,) = report.targets[1].errors
    assert error.splitlines()[0] == "gone: connect: refused the connection"
    assert "next:  ssh gone true" in error
    assert desk.history("gone") == []
    assert desk.history("a") == [f"{report.id}.json"]


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (Verdict.FAIL, ExitCode.CHECK_FAILED),
        (Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        (Verdict.SKIPPED, ExitCode.INCONCLUSIVE),
        (CheckFailed("it died"), ExitCode.CHECK_FAILED),
        (Inconclusive("no journal"), ExitCode.INCONCLUSIVE),
        (HealthTimeout("too slow"), ExitCode.HEALTH_TIMEOUT),
        (OpsError("odd"), ExitCode.ERROR),
        (ZeroDivisionError(), ExitCode.ERROR),
        (UnreachableError("gone away"), ExitCode.UNREACHABLE),
        (LockHeld("somebody deploys"), ExitCode.LOCK_HELD),
    ],
)
def test_exit_codes(desk: Desk, said: Any, code: ExitCode) -> None:
    playbook = Playbook(name="one", steps=(Plain(kind="drift"),))
    desk.says["drift", "a"] = said
    report, found = desk.run("a", playbook)
    assert found is code
    assert report.verdict is not Verdict.PASS
    assert report.complete


def test_a_host_that_goes_away_or_is_somebody_elses_goes_no_further(desk: Desk) -> None:
    desk.says["drift", "a"] = UnreachableError("the connection is gone")
    desk.says["doctor", "b"] = LockHeld("somebody deploys")
    report, code = desk.run("a b c")
    assert [kind for host, kind in desk.done if host == "a"] == ["doctor", "drift"]
    assert [kind for host, kind in desk.done if host == "b"] == ["doctor"]
    assert code is ExitCode.UNREACHABLE
    assert verdicts(report) == {"a": "fail", "b": "fail", "c": "pass"}
    assert [len(target.errors) for target in report.targets] == [1, 1, 0]
    assert (desk.history("a"), desk.history("b")) == ([], [])


@pytest.mark.parametrize("names", ["a", "a b"])
def test_an_interruption_leaves_a_valid_report_that_is_not_complete(desk: Desk, names: str) -> None:
    def interrupt(deployment: Deployment) -> None:
        signal.raise_signal(signal.SIGINT)
        deployment.session.run(
            ["sleep", "600"]
        )  # where another thread runs this, the session is closed under it

    desk.says["validate", "a"] = interrupt
    typed = "ddtree-ops nightly {host} --suite quick --report-dir r"
    report, code = desk.run(names, wishes=Wishes(again=typed))
    assert code is ExitCode.INTERRUPTED
    assert (report.complete, report.verdict) == (False, Verdict.INCONCLUSIVE), "nothing failed"
    assert report.ended
    assert checks(report, "a")["doctor.it"] == "pass"
    (told,) = [one for one in report.targets[0].checks if one.name == "interrupted"]
    assert told.hint == typed.format(host="a"), "nothing was changed: there is nothing to deploy"
    assert desk.history("a") == []
    assert desk.kept[-1] == report
    again, code = desk.run("a", Playbook(name="one", steps=(Plain(kind="drift"),)))  # the lock is free
    assert (code, again.complete) == (ExitCode.OK, True)


def test_a_second_run_at_the_same_time_is_refused_before_anything_is_contacted(desk: Desk) -> None:
    refused: list[OpsError] = []

    def another(deployment: Deployment) -> None:
        before = len(desk.kept)
        with pytest.raises(LockHeld) as caught:
            desk.run("b a")
        refused.append(caught.value)
        assert len(desk.kept) == before

    desk.says["drift", "a"] = another
    _, code = desk.run("a")
    assert code is ExitCode.OK
    assert refused[0].exit_code is ExitCode.LOCK_HELD
    assert refused[0].state == "nothing was contacted or changed"


def test_what_is_wrong_with_the_wishes_is_said_before_anything_is_contacted(
    desk: Desk, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no suite named quik"):
        desk.run("a", wishes=Wishes(suite="quik"))
    with pytest.raises(UsageError, match="no check named shrt-chat"):
        desk.run("a", wishes=Wishes(checks=("shrt-chat",)))
    with pytest.raises(ConfigError, match=r"none\.json"):
        desk.run("a", wishes=Wishes(checks=("lossless",), golden=str(tmp_path / "none.json")))
    with pytest.raises(UsageError, match="none of the chosen checks compares with it"):
        desk.run("a", wishes=Wishes(checks=("stop",), golden=str(tmp_path / "none.json")))
    own = tmp_path / "own.yaml"
    own.write_text("schema: 1\nsteps: [doctor]\n")
    nested = Playbook(name="n", steps=(Plain(kind="doctor"), Deploy(playbook=str(own))))
    with pytest.raises(ConfigError, match="a playbook that reports itself"):
        desk.run("a", nested)
    assert desk.done == []
    assert desk.kept == []


def test_a_report_that_is_not_complete_passes_nothing() -> None:
    good = TargetReport("a", "a", "s", checks=(CheckResult("smoke", Verdict.PASS, "fine"),))
    part = RunReport("nightly", "id", "2026-11-30T01:00:00+00:00", targets=(good,))
    whole = replace(part, complete=True)
    assert (part.verdict, whole.verdict) == (Verdict.INCONCLUSIVE, Verdict.PASS)
    assert replace(part, targets=(replace(good, errors=("gone",)),)).verdict is Verdict.FAIL
    assert exit_code(part, [ExitCode.OK]) is ExitCode.INCONCLUSIVE
    assert exit_code(whole, [ExitCode.OK]) is ExitCode.OK
    assert exit_code(replace(whole, targets=()), []) is ExitCode.INCONCLUSIVE
    assert exit_code(part, [ExitCode.OK, ExitCode.UNREACHABLE]) is ExitCode.UNREACHABLE


def test_where_the_journal_is_read_from() -> None:
    newest = datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
    day, before = timedelta(days=1), newest - timedelta(hours=5)
    assert journal_since(None, newest, 86400.0) == (newest - day, False)
    assert journal_since(before, newest, 86400.0) == (before + timedelta(microseconds=1), False)
    assert journal_since(newest, newest, 86400.0) == (newest + timedelta(microseconds=1), False)
    # the clock was set back: what was written since lies before the mark
    assert journal_since(newest + day, newest, 86400.0) == (newest - day, True)


def _looked(night: Any, deployment: Any, **more: Any) -> None:
    """In the place of a look at the host: the run ``i1`` serves there."""
    deployment.observed = SimpleNamespace(state=SimpleNamespace(invocation_id="i1"))
    night.seen[nightly._key(deployment.target)].facts["invocation"] = "i1"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a nightly hands to the checks of a host."""

    def handed(step: Validate, wishes: Wishes | None = None, **more: Any) -> dict[str, Any]:
        given: list[dict[str, Any]] = []

        def asked(session: Any, target: Target, plan: Any, **more: Any) -> Any:
            given.append(more["shared"])
            raise Inconclusive("not asked any more")

        monkeypatch.setattr("ddtree_ops.checks.validation.run.validate", asked)
        monkeypatch.setattr(nightly._Night, "_facts", _looked)
        monkeypatch.setattr("ddtree_ops.checks.validation.suites.heed_golden", lambda *_: None)
        monkeypatch.setattr(
            nightly,
            "accept_lengths",
            lambda now, past, **more: [
                Figure("accept_length", 4.0 + len(past.runs), "tokens/step", "history")
            ],
        )
        run_nightly(
            Playbook(name="n", steps=(step,)),
            _targets(tmp_path, "box1"),
            store=Store(tmp_path / "history", "lab"),
            connect=lambda target: connect_local(target.host.name),
            report=lambda event: None,
            keep=lambda report: None,
            wishes=wishes,
            **more,
        )
        return given[0]

    return handed


def test_the_checks_get_baseline_golden_file_and_history(shared: Callable[..., dict[str, Any]]) -> None:
    step = Validate(checks=("lossless",), golden="step.json")
    first = shared(step, baseline=lambda target: f"that of {target.name}")
    assert first[BASELINE] == "that of box1"
    assert first[GOLDEN] == "step.json"
    assert [one.value for one in first[HISTORY]] == [4.0]
    again = shared(step, Wishes(golden="own.json"))
    assert again[GOLDEN] == "own.json"
    assert [one.value for one in again[HISTORY]] == [5.0]
    alone = shared(Validate(checks=("lossless",)))
    assert not alone[BASELINE]
    assert not alone[GOLDEN]


@pytest.mark.parametrize(
    ("steps", "validated", "kept"),
    [
        ((Plain(kind="drift"), Validate(checks=("stop",))), Verdict.PASS, False),
        ((Plain(kind="drift"), Validate(checks=("stop",))), Verdict.FAIL, True),
        ((Plain(kind="drift"), Validate(checks=("stop",))), Verdict.INCONCLUSIVE, True),
    ],
)
def test_a_journal_is_kept_only_of_failures_that_it_can_explain(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Step, ...],
    validated: Verdict,
    kept: bool,
) -> None:
    captured: list[str] = []
    found = CheckResult("stop", validated, "said", hint="look")
    report = DriftReport("a", "t.service", "a" * 64, True, (replace(UNSEEN, id="unit.other"),), files=3)
    monkeypatch.setattr("ddtree_ops.deploy.drift.find_drift", lambda *_, **__: report)
    monkeypatch.setattr(
        "ddtree_ops.checks.validation.run.validate", lambda *_, **__: Validation((found,), {})
    )
    monkeypatch.setattr(nightly._Night, "_facts", _looked)
    monkeypatch.setattr(Deployment, "capture", lambda self: captured.append(self.target.name))
    events: list[Event] = []
    _, code = run_nightly(
        Playbook(name="n", steps=steps, on_failure=(Plain(kind="capture"),)),
        _targets(tmp_path, "a"),
        store=Store(tmp_path / "history", "lab"),
        connect=lambda target: connect_local(target.host.name),
        report=events.append,
        keep=lambda report: None,
    )
    assert code is ExitCode.CHECK_FAILED
    assert captured == (["a"] if kept else [])
    (line,) = [event.message for event in events if event.phase == "drift" and event.elapsed_s is not None]
    assert line.startswith("drift.unit.other: nobody has"), "the line of a failed step names the check"


def test_the_run_that_wrote_of_a_crash_is_named() -> None:
    asked: list[Any] = []

    class Control:
        def entries(self, **given: Any) -> Any:
            asked.append((given["since"], given["until"]))
            return (SimpleNamespace(invocation=run) for run in ("", "i1", "i2"))

    deployment: Any = SimpleNamespace(control=Control())
    root = SimpleNamespace(first="2026-11-30T10:48:23.513779+00:00")
    assert nightly._run_of(deployment, SimpleNamespace(root=root)) == "i1"  # type: ignore[arg-type]
    assert asked == [("2026-11-30T10:48:23.513779+00:00", "2026-11-30T10:48:24.513779+00:00")]
    for root in (None, SimpleNamespace(first="")):
        assert nightly._run_of(deployment, SimpleNamespace(root=root)) == ""  # type: ignore[arg-type]
    assert len(asked) == 1


def test_a_failed_step_names_the_first_check_and_counts_the_others() -> None:
    results = [CheckResult(name, Verdict.FAIL, f"{name} is bad") for name in ("a", "b", "c")]
    with pytest.raises(CheckFailed) as caught:
        told([CheckResult("ok", Verdict.PASS, "fine"), *results], "h")
    assert caught.value.message == "a: a is bad (and 2 more: b, c)"
    assert told([CheckResult("ok", Verdict.PASS, "fine")], "h") == "fine"


UNSEEN = Finding(
    "run.unvalidated", Severity.WARN, "a run that was seen to work", "nobody has", "ddtree-ops deploy a"
)


@pytest.mark.parametrize(
    ("found", "invocation", "drift", "code"),
    [
        ({"stop": Verdict.PASS, "steady": Verdict.PASS}, "i1", "skipped", ExitCode.OK),
        ({"stop": Verdict.PASS, "steady": Verdict.PASS}, "i2", "fail", ExitCode.CHECK_FAILED),
        ({"stop": Verdict.SKIPPED, "steady": Verdict.PASS}, "i1", "fail", ExitCode.CHECK_FAILED),
        ({"stop": Verdict.PASS, "steady": Verdict.INCONCLUSIVE}, "i1", "fail", ExitCode.CHECK_FAILED),
        ({"stop": Verdict.FAIL, "steady": Verdict.PASS}, "i1", "fail", ExitCode.CHECK_FAILED),
    ],
)
def test_a_run_that_nobody_has_seen_work_is_a_note_where_this_night_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Verdict],
    invocation: str,
    drift: str,
    code: ExitCode,
) -> None:
    def validated(session: Any, target: Target, plan: Any, *, on_result: Any, **more: Any) -> Validation:
        results = tuple(CheckResult(name, verdict, "said", hint="look") for name, verdict in found.items())
        for result in results:
            on_result(result)
        return Validation(results, {"invocation": invocation})

    def looked(night: Any, deployment: Deployment, **more: Any) -> None:
        _looked(night, deployment)
        seen.append(deployment)

    seen: list[Deployment] = []
    kept: list[RunReport] = []
    report = DriftReport("a", "t.service", "a" * 64, True, (UNSEEN,), files=3)
    monkeypatch.setattr("ddtree_ops.deploy.drift.find_drift", lambda *_, **__: report)
    monkeypatch.setattr("ddtree_ops.checks.validation.run.validate", validated)
    monkeypatch.setattr(nightly._Night, "_facts", looked)
    whole, ended = run_nightly(
        Playbook(name="n", steps=(Plain(kind="drift"), Validate(checks=("stop",)))),
        _targets(tmp_path, "a"),
        store=Store(tmp_path / "history", "lab"),
        connect=lambda target: connect_local(target.host.name),
        report=lambda event: None,
        keep=kept.append,
    )
    name = "drift.run.unvalidated"
    assert (checks(whole, "a")[name], ended) == (drift, code)
    (told,) = [check for check in whole.targets[0].checks if check.name == name]
    assert ("this nightly's validate passed" in told.summary) is (drift == "skipped")
    before = next(one for one in kept if name in checks(one, "a"))
    assert checks(before, "a")[name] == "skipped"
    assert before.verdict is Verdict.INCONCLUSIVE
    assert seen[-1].invocation == "i1", "on_failure keeps and explains the run that was asked"


def test_parts() -> None:
    doctor, deploy, validate = Plain(kind="doctor"), Deploy(when="asked"), Validate()
    bench, always, trend = Bench(when="asked"), Deploy(), Trend()
    steps: list[Step] = [doctor, deploy, validate, bench, trend]
    assert parts_of(steps, Wishes()) == [(doctor, validate, trend)]
    assert parts_of(steps, Wishes(deploy=True)) == [(doctor,), (deploy,), (validate, trend)]
    assert parts_of(steps, Wishes(bench=True)) == [(doctor, validate), (bench,), (trend,)]
    assert parts_of([always, validate], Wishes()) == [(always,), (validate,)]
    assert parts_of([always, validate], Wishes(deploy=False)) == [(validate,)]


def test_drift_as_results() -> None:
    findings = (
        Finding("release.files", Severity.ERROR, "as built", "2 files differ", "ddtree-ops deploy h"),
        Finding("release.other", Severity.WARN, "release b", "release a", "ddtree-ops plan h"),
        Finding("process.user", Severity.INFO, "root", "root"),
    )
    report = DriftReport("h", "u", "a" * 64, True, findings, files=3)
    found = {one.name: one.verdict.value for one in drift_results(report, mended=False)}
    assert found == {"drift.release.files": "fail", "drift.release.other": "fail"}
    found = {one.name: one.verdict.value for one in drift_results(report, mended=True)}
    assert found == {"drift.release.files": "fail", "drift.release.other": "skipped"}
    unseen = DriftReport("h", "u", "a" * 64, True, (*findings[:1], UNSEEN), files=3)
    last = [drift_results(unseen, mended=False, validated=known)[-1].verdict.value for known in (False, True)]
    assert last == ["fail", "skipped"]
    expected = drift_results(DriftReport("h", "u", "a" * 64, True, findings[1:], files=3), mended=True)
    assert [one.verdict.value for one in expected] == ["pass", "skipped"]
    (none,) = drift_results(DriftReport("h", "u", None, False), mended=False)
    assert (none.verdict, none.hint) == (Verdict.INCONCLUSIVE, "ddtree-ops deploy h")
    named = replace(findings[0], names=("changed: sglang/a.py", "missing: sglang/b.py"))
    (result,) = drift_results(DriftReport("h", "u", "a" * 64, True, (named,)), mended=False)
    assert [one.text for one in result.evidence] == ["changed: sglang/a.py\nmissing: sglang/b.py"]
    (clean,) = drift_results(DriftReport("h", "u", "a" * 64, True, (), files=3), mended=False)
    assert clean.verdict is Verdict.PASS
    assert "3 files read" in clean.summary


def test_flags_name_a_configuration_and_not_a_release() -> None:
    unit = "[Service]\nEnvironment=A=1\nExecStart=/v/python -m sglang --port 1 --budget {}\n"
    assert flags_digest(unit.format(8)) == flags_digest(unit.format(8)) != flags_digest(unit.format(16))
    assert flags_digest(unit.format(8)) != flags_digest(unit.format(8).replace("A=1", "A=2"))
    assert flags_digest(None) == ""
    assert flags_digest("[Service]\nExecStart=/v/python %h\n") == ""
