"""Drift and status as a person reads them: golden texts, on a pipe and on a narrow terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from textwrap import dedent

import pytest
from rich.console import Console

from ddtree_ops.deploy.drift import DriftReport, Finding, Severity
from ddtree_ops.deploy.history import Activation, History
from ddtree_ops.deploy.plan import Change, ChangeKind, FileDelta, Plan, ValueChange, Wish
from ddtree_ops.deploy.status import Figures, Patch, Seen, Status
from ddtree_ops.errors import UnreachableError
from ddtree_ops.report.lists import print_history
from ddtree_ops.report.summary import print_plan
from ddtree_ops.report.tables import ago, print_drift, print_status
from ddtree_ops.results import Verdict
from ddtree_ops.service.state import UnitState

NOW = 1795971900.0  # 2026-11-29 17:05:00 UTC


def shown(printer, *arguments, terminal: bool = False, width: int = 80, **more) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, force_terminal=terminal, color_system=None)
    printer(console, *arguments, **more)
    return file.getvalue()


def golden(text: str) -> str:
    return dedent(text).lstrip("\n")


PLAN = Plan(
    Wish("ct200", "k26", "k26.service", "b" * 64, "sglang-0.5.11-ddtree", "[Service]\n"),
    (
        Change(ChangeKind.RELEASE, "publish release bbbbbbbbbbbb (sglang-0.5.11-ddtree)"),
        Change(ChangeKind.RESTART, "restart: the release changes"),
    ),
    files=FileDelta("a" * 64, added=("sglang/new.py",), changed=("sglang/a.py",)),
    arguments=(ValueChange("--budget", "32", "16"), ValueChange("--old", "1", None)),
    variables=(ValueChange("HF_TOKEN", None, "********"),),
    reasons=("the release changes",),
    stays=("no new unit file: the installed one is as wished",),
)


def test_what_a_bench_deployed_is_marked_in_the_history():
    made = [
        Activation(f"i{number}", "2026-11-29T17:05:00+00:00", "a" * 64, "u", "p", "ann", "desk", reason,
                   verdict=Verdict.PASS, command=command)
        for number, (reason, command) in enumerate(
            [("deploy", ""), ("deploy", "deploy"), ("deploy", "bench"), ("rollback", "bench"), ("validate", "")]
        )
    ]  # fmt: skip
    text = shown(print_history, "ct200", "k26.service", History(tuple(made)), {}, lines=9)
    acts = [line.split()[2] for line in text.splitlines() if "17:05:00Z" in line]
    assert acts == ["deploy", "deploy", "bench", "rollback", "validate"]


def test_a_plan_counts_files_and_names_arguments():
    text = shown(print_plan, PLAN)
    assert text == golden(
        """
        ct200 k26.service  sglang-0.5.11-ddtree bbbbbbbbbbbb
          ~ publish release bbbbbbbbbbbb (sglang-0.5.11-ddtree)
          ~ restart: the release changes
          runtime files: 1 added, 1 changed against aaaaaaaaaaaa  (--files names them)
          arguments:
            --budget: 32 -> 16
            - --old 1
          environment:
            + HF_TOKEN ********
          = no new unit file: the installed one is as wished
        """
    )
    named = shown(print_plan, PLAN, files=True)
    assert "    + sglang/new.py\n    ~ sglang/a.py\n" in named
    assert "--files" not in named


def test_a_plan_says_what_cannot_be_compared():
    unread = Plan(PLAN.wish, PLAN.changes, None, "nothing is deployed to compare with", None, None)
    text = shown(print_plan, unread)
    assert "  runtime files: nothing is deployed to compare with\n" in text
    assert text.count("cannot be read back word by word: see the diff") == 2


DRIFT = DriftReport(
    "ct200",
    "k26.service",
    "b" * 64,
    deployed=True,
    files=2535,
    findings=(
        Finding(
            "release.files",
            Severity.ERROR,
            "2535 files of release bbbbbbbbbbbb as built",
            "12 changed",
            "ddtree-ops deploy ct200",
            ("changed: sglang/a.py",),
            12,
        ),
        Finding("unit.disabled", Severity.WARN, "started at boot", "disabled", ""),
        Finding("venv.record", Severity.INFO, "a RECORD", "there is none", ""),
    ),
)


def test_drift_says_what_should_be_what_is_and_what_to_type():
    assert shown(print_drift, [DRIFT]) == golden(
        """
        ct200 k26.service  bbbbbbbbbbbb, 2535 files hashed: drift, 1 error and 1 warning
          ✗ release.files: 12 changed
            should be: 2535 files of release bbbbbbbbbbbb as built
              changed: sglang/a.py
              ... and 11 more
            next: ddtree-ops deploy ct200
          ! unit.disabled: disabled
            should be: started at boot
          · venv.record: there is none
            should be: a RECORD
        """
    )


def test_no_drift_and_nothing_deployed():
    clean = DriftReport("h", "s.service", "b" * 64, deployed=True, files=3)
    never = DriftReport("i/s", "s.service", None, deployed=False)
    assert shown(print_drift, [clean, never]) == golden(
        """
        h s.service  bbbbbbbbbbbb, 3 files hashed: no drift
        i/s s.service  never deployed: nothing to judge
          next: ddtree-ops deploy i
        """
    )


def _status(host: str, *, verdict: Verdict | None = Verdict.PASS, **more) -> Status:
    state = UnitState.parse(
        {
            "Id": "k26.service",
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "InvocationID": "i1",
            "ActiveEnterTimestamp": "Sun 2026-11-29 14:00:00 UTC",
        }
    )
    item = Activation(
        "1", "2026-11-29T14:00:00+00:00", "b" * 64, "u", "p", "ann", "desk", verdict=verdict, invocation="i1"
    )
    values = {
        "state": state,
        "now": NOW,
        "release": "b" * 64,
        "history": History((item,)),
        "http": 200,
        "model": "kimi-k2.6",
        "figures": Figures(2.31, 1382.9, 75.0),
        **more,
    }
    return Status(host, "k26", "k26.service", seen=Seen(**values), patch=Patch("patched", True))


def test_status_is_one_screen():
    down = UnitState.parse(
        {
            "Id": "k26.service",
            "LoadState": "loaded",
            "ActiveState": "failed",
            "SubState": "failed",
            "Result": "signal",
        }
    )
    error = UnreachableError("ct201: no route to host", host="gone", hint="check the network")
    rows = [
        _status("ct200", lock="bob on x holds the lock of k26.service", armed="armed by bob"),
        _status("b300", state=down, figures=Figures(note="it does not run"), http=0, model=""),
        Status("gone", "k26", "k26.service", error=error),
    ]
    assert shown(print_status, rows) == golden(
        """
        HOST  UNIT        SINCE RELEASE      PATCH   READY     ACCEPT TOK/S
        ct200 active      3h    bbbbbbbbbbbb patched validated 2.31   1383
            model kimi-k2.6; figures 75s old
            last deploy 3h ago by ann on desk: pass
            rollback: armed by bob
            lock: bob on x holds the lock of k26.service
        b300  failed      -     bbbbbbbbbbbb patched -         -      -
            k26.service is failed (failed), result signal
            next: ddtree-ops diagnose b300
            last deploy 3h ago by ann on desk: pass
        gone  unreachable -     -            -       -         -      -
            ct201: no route to host
            next: check the network
        """
    )


def test_the_overlay_of_a_release_is_told():
    row = replace(
        _status("h"), patch=Patch("patched", True, "", "ddtree_sglang 0.1.0 with entry point ddtree")
    )
    assert "    model kimi-k2.6; ddtree_sglang 0.1.0 with entry point ddtree; figures 75s old\n" in shown(
        print_status, [row]
    )
    assert row.to_json()["patch"]["overlay"] == "ddtree_sglang 0.1.0 with entry point ddtree"


def test_a_wrong_size_and_a_foreign_runner_stand_out():
    row = _status("h", verdict=None, figures=Figures(note="no decode line"))
    row = Status("h", "k26", "k26.service", seen=row.seen, patch=Patch("unpatched", False))
    text = shown(print_status, [row])
    assert "unpatched! answering -      -" in text
    assert "graphs of the WRONG size for this service; no figures: no decode line" in text
    assert "this run was never validated" in text
    assert "none ever passed" in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_on_a_terminal_no_line_is_wider_than_it(width):
    rows = [_status("ct200", lock="bob on a machine with a long name holds the lock of k26.service")]
    for printer, what in ((print_status, rows), (print_drift, [DRIFT])):
        lines = shown(printer, what, terminal=True, width=width).splitlines()
        assert max(map(len, map(str.rstrip, lines))) <= width


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7300, "2h"), (86400 * 3, "3d")]
)
def test_ages_are_short(seconds, text):
    assert ago(seconds) == text
