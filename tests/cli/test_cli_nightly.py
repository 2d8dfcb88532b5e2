"""``nightly`` as it is typed: what it asks for, what is refused, the command to type again. No host is contacted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_ops.errors import ExitCode
from ddtree_ops.playbook import nightly, webhook
from ddtree_ops.playbook.nightly import Wishes
from ddtree_ops.report.write import read_report, write_report
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport, TargetReport

INVENTORY = """\
schema: 1
runtimes:
  r: {description: sglang-0.5.11, python: cp312}
services:
  a: {unit: a.service, runtime: r, venv: /v, model: /m, port: 3001}
hosts:
  one: {address: 127.0.0.1, services: [a]}
"""


def night(command: str) -> RunReport:
    target = TargetReport("one", "one", "a", checks=(CheckResult("stop", Verdict.PASS, "stopped"),))
    at = "2026-11-30T06:30:00+00:00"
    return RunReport(command, "20261130T063000Z-ab12", at, at, complete=True, targets=(target,))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Callable[..., Any]) -> Callable[..., Any]:
    """How a command ended, and the wishes of the nightly that it began; none where it began none."""
    (tmp_path / "site.yaml").write_text(INVENTORY)
    monkeypatch.setenv("DDTREE_OPS_INVENTORY", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[Any, list[Wishes]]:
        begun: list[Wishes] = []

        def began(*_: Any, wishes: Wishes, keep: Any, **more: Any) -> tuple[RunReport, ExitCode]:
            begun.append(wishes)
            keep(night("nightly"))
            return night("nightly"), ExitCode.OK

        monkeypatch.setattr(nightly, "run_nightly", began)
        return typed("nightly", "one", *argv), begun

    return run


def test_the_command_to_type_again_has_all_that_was_given(asked: Callable[..., Any]) -> None:
    given = "--suite quick --check stop --report-dir reports --no-deploy --bench --webhook-env HOOK --lock-wait 90s"
    _, (wishes,) = asked("--suite", "quick")
    assert wishes.again == "ddtree-ops nightly {host} --suite quick"
    ended, begun = asked(*given.split())
    assert (ended.code, begun) == (78, []), "the variable is not set"
    _, (wishes,) = asked(*given.replace("--webhook-env HOOK ", "").replace("--check", "-c").split())
    assert wishes.checks == ("stop",)
    words = wishes.again.split()
    assert words[:3] == ["ddtree-ops", "nightly", "{host}"]
    assert sorted(words[3:]) == sorted(given.replace("--webhook-env HOOK ", "").split())


def test_a_folder_with_the_report_of_another_command_is_refused(
    asked: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "reports"
    for command in ("bench", "validate"):
        write_report(night(command), folder)
        ended, begun = asked("--report-dir", "reports")
        assert (ended.code, begun) == (2, [])
        assert f"reports holds the report of another command: {command} 20261130T063000Z-ab12" in ended.err
        assert "nothing was contacted or changed" in ended.err
        assert read_report(folder).command == command
    write_report(night("nightly"), folder)
    for text in (None, "[]", "cut off"):
        if text is not None:
            (folder / "report.json").write_text(text)
        ended, begun = asked("--report-dir", "reports")
        assert (ended.code, len(begun)) == (0, 1)
        assert json.loads((folder / "report.json").read_text())["command"] == "nightly"


@pytest.mark.parametrize("option", ["--webhook-env", "--webhook-file"])
def test_a_webhook_that_was_not_reached_is_told_by_what_named_it(
    asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    (tmp_path / "HOOK").write_text("http://192.0.2.1/hook/s3cret-t0ken")
    monkeypatch.setenv("HOOK", "http://192.0.2.1/hook/s3cret-t0ken")
    monkeypatch.setattr(webhook, "post", lambda *_, **__: webhook.Sent(5, "ConnectError after 5 attempts"))
    ended, _ = asked(option, "HOOK")
    where = "variable HOOK" if option == "--webhook-env" else "file HOOK"
    assert ended.code == ExitCode.ERROR
    assert f"the webhook of {where} was not told: ConnectError" in ended.err
    assert "s3cret" not in ended.out + ended.err
