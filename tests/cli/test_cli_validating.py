"""``validate`` as it is typed: what is wrong with a command line, lists, a host that is not reached. No host is reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.validation import golden, run
from ddtree_ops.checks.validation.run import Validation
from ddtree_ops.cli import validating
from ddtree_ops.report.write import read_report
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport

INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
defaults:
  host: {ssh: {user: root, port: 1, known_hosts: /dev/null, connect_timeout: 2s}}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001}
hosts:
  one: {address: 127.0.0.1, services: [a]}
  two: {address: 127.0.0.1, services: [a]}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[..., Any]) -> Callable[..., Any]:
    path = tmp_path / "site.yaml"
    path.write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(path))
    monkeypatch.chdir(tmp_path)
    return typed


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["one", "--check", "prefx-hit"], 2, "did you mean 'prefix-hit'?"),
        (["one", "--suite", "quik"], 2, "did you mean 'quick'?"),
        (["nowhere"], 2, "no host or group matches 'nowhere'"),
        (["one", "--suite", "./nowhere.yaml"], 78, "nowhere.yaml"),
        (["one", "--suite", "wrong.yaml"], 78, "wrong.yaml:3: checks[0]: there is no check 'burts'"),
        (["one", "two", "--record", "golden.json"], 2, "--record is for one target, and 2 are selected"),
        (["one", "--timeout", "soon"], 2, "--timeout"),
        (["one", "--record", "notes.md"], 2, "notes.md: that is there already, and no golden file"),
        (["one", "--record", "."], 2, "no golden file: it would be overwritten"),
        (["one", "--record", "a.json", "--golden", "b.json"], 2, "--record and --golden together"),
        (["one", "-c", "lossless", "--golden", "notes.md"], 78, "notes.md: no golden file: it is not JSON"),
        (["one", "-c", "lossless", "--golden", "nowhere.json"], 78, "nowhere.json: there is no such file"),
        (["one", "--suite", "./own.yaml"], 78, "nowhere.json: there is no such file"),
        (["one", "--golden", "nowhere.json"], 2, "none of the chosen checks compares with it"),
    ],
)
def test_what_is_wrong_is_said(
    command: Callable[..., Any], tmp_path: Path, argv: list[str], code: int, said: str
) -> None:
    (tmp_path / "wrong.yaml").write_text("schema: 1\nchecks:\n  - burts\n")
    (tmp_path / "own.yaml").write_text("schema: 1\nchecks:\n  - lossless: {golden: nowhere.json}\n")
    (tmp_path / "notes.md").write_text("# notes\n")
    ended = command("validate", *argv)
    assert (ended.code, said in ended.err, ended.out) == (code, True, ""), ended
    assert "Traceback" not in ended.err
    assert "connect" not in ended.err, "nothing is contacted"
    assert "--record notes.md" not in ended.err.replace("error: --record", "")
    assert (tmp_path / "notes.md").read_text() == "# notes\n"


def test_checks_and_suites_are_listed(command: Callable[..., Any]) -> None:
    ended = command("validate", "--list")
    assert ended.code == 0
    assert "prefix-hit    the same prompt again is answered from the cache, and the same (quick" in ended.out
    assert "suite full: " in ended.out
    document = json.loads(command("validate", "--list", "--json").out)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["steady"]["standing"]
    assert checks["burst"]["settings"]["widths"] == [8, 16]
    assert "              in quick: widths: [8], alone: 4\n" in ended.out, (
        "what a suite sets otherwise is told"
    )
    one = json.loads(command("validate", "--list", "--suite", "quick", "--json").out)
    quick = {check["name"]: check for check in one["checks"]}
    assert {"burst", "steady"} <= quick.keys() < checks.keys()
    assert quick["burst"]["settings"]["widths"] == [8], "with a suite, its settings"
    assert "settings: widths: [8], " in command("validate", "--list", "--suite", "quick").out


def test_hosts_that_are_not_reached_are_no_pass(command: Callable[..., Any], tmp_path: Path) -> None:
    ended = command("validate", "one", "--check", "stop", "--json", "--report-dir", "reports")
    assert ended.code == 4
    report = RunReport.from_json(json.loads(ended.out))
    assert (report.command, report.complete, report.verdict.value) == ("validate", True, "fail")
    assert [target.errors[0].splitlines()[0].startswith("one: connect") for target in report.targets] == [
        True
    ]
    assert json.loads((tmp_path / "reports" / "report.json").read_text())["id"] == report.id


def test_a_report_is_kept_where_no_directory_is_named(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ended = command("validate", "one", "--check", "stop", "--json")
    (kept,) = (tmp_path / "state" / "ddtree-ops" / "reports").iterdir()
    report = json.loads((kept / "report.json").read_text())
    assert (kept.name, report) == (f"validate-{report['id']}", json.loads(ended.out))


def test_a_report_that_cannot_be_written_is_told_before_anything_is_asked(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    ended = command("validate", "one", "--check", "stop", "--report-dir", "taken/reports")
    assert (ended.code, ended.out) == (1, "")
    assert "cannot be written" in ended.err
    assert "nothing was contacted" in ended.err
    assert "connect" not in ended.err.replace("nothing was contacted", "")


def test_a_recording_says_that_it_goes_on_and_what_it_wrote(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validating, "masked_session", lambda target: nullcontext())
    monkeypatch.setattr(run, "open_context", lambda *_, **__: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(golden, "record", lambda ctx, path: SimpleNamespace(prompts=("a", "b")))
    ended = command("validate", "one", "--record", "golden.json")
    assert (ended.code, ended.out) == (0, "")
    begun, done = ended.err.splitlines()
    assert begun.endswith("one validate: ... what it writes alone is recorded")
    assert "one validate: ok 2 prompts, each answered three times, in golden.json" in done
    assert "in place of" not in done
    Path("golden.json").write_text('{"schema": 1, "prompts_sha256": "", "prompts": []}')
    ended = command("validate", "one", "--record", "golden.json")
    assert (ended.code, "in golden.json (in place of the earlier golden file)" in ended.err) == (0, True)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a run find this on every host: ``found(verdict, meanwhile)``; ``meanwhile`` is called after the first result."""

    def set_up(verdict: Verdict, meanwhile: Callable[[], None] = lambda: None) -> None:
        def ran(
            session: Any, target: Any, plan: Any, *, on_result: Any, on_facts: Any, **more: Any
        ) -> Validation:
            facts = {"model": "m"}
            assert more["named"] == ["short-chat"]
            results = (
                CheckResult("short-chat", verdict, "said"),
                CheckResult("steady", Verdict.PASS, "same"),
            )
            on_facts(facts)
            on_result(results[0])
            meanwhile()
            on_result(results[1])
            return Validation(results, facts)

        monkeypatch.setattr(run, "validate", ran)
        monkeypatch.setattr(validating, "masked_session", lambda target: nullcontext())

    return set_up


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("verdict", "code"), [(Verdict.PASS, 1), (Verdict.FAIL, 5), (Verdict.INCONCLUSIVE, 8)]
)
def test_a_directory_that_goes_away_takes_no_result_along(
    command: Callable[..., Any],
    tmp_path: Path,
    found: Callable[..., None],
    verdict: Verdict,
    code: int,
    as_json: bool,
) -> None:
    place = tmp_path / "reports"

    def taken() -> None:
        shutil.rmtree(place)
        place.write_text("a file")

    found(verdict, taken)
    ended = command(
        "validate",
        "one",
        "--check",
        "short-chat",
        "--report-dir",
        "reports",
        *(["--json"] if as_json else []),
    )
    assert ended.code == code
    assert "reports/report.json cannot be written" in ended.err
    if as_json:
        assert RunReport.from_json(json.loads(ended.out)).verdict is verdict
    else:
        assert "short-chat" in ended.out


def test_what_was_found_is_written_as_it_comes(
    command: Callable[..., Any], tmp_path: Path, found: Callable[..., None]
) -> None:
    place, seen = tmp_path / "reports", []
    found(Verdict.PASS, lambda: seen.append(read_report(place)))
    ended = command("validate", "one", "--check", "short-chat", "--report-dir", "reports")
    assert (ended.code, "report: reports" in ended.err) == (0, True)
    (partial,) = seen
    assert (partial.complete, partial.ended, partial.verdict) == (False, "", Verdict.INCONCLUSIVE)
    (target,) = partial.targets
    assert (target.facts, [check.name for check in target.checks]) == ({"model": "m"}, ["short-chat"])
    whole = read_report(place)
    assert (whole.id, whole.complete, len(whole.targets[0].checks)) == (partial.id, True, 2)
    assert {path.name for path in place.iterdir()} >= {
        "report.json",
        "junit.xml",
        "report.html",
        "summary.md",
    }


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_where_the_report_is_is_said(
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Callable[..., None],
    verdict: Verdict,
    more: list[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found(verdict)
    ended = command("validate", "one", "--check", "short-chat", *more)
    (kept,) = (tmp_path / "state" / "ddtree-ops" / "reports").iterdir()
    assert f"report: {kept}\n" in ended.err


def test_where_the_report_of_an_interrupted_run_is_is_said(
    command: Callable[..., Any], found: Callable[..., None]
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    found(Verdict.PASS, stop)
    ended = command("validate", "one", "--check", "short-chat", "--report-dir", "reports")
    assert ended.code == 130
    assert "report: reports (interrupted: what was known until then)\n" in ended.err
    assert not read_report(Path("reports")).complete
