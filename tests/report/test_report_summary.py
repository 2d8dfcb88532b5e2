"""What a person reads at the end of a command, as golden texts."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

from rich.console import Console
from rich.text import Text

from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.deploy.plan import Change, ChangeKind, Plan, Wish
from ddtree_ops.deploy.router import RouterView, WorkerView
from ddtree_ops.diagnose.api import diagnose
from ddtree_ops.diagnose.lines import read_log
from ddtree_ops.errors import CheckFailed, RolledBack
from ddtree_ops.report.routers import print_router_view
from ddtree_ops.report.summary import print_checks, print_diagnosis, print_plan, print_results, say
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.service.state import UnitState

WISH = Wish("ct200", "k26", "k26.service", "b" * 64, "sglang-0.5.11-ddtree", "[Service]\n")
CRASH = b"RuntimeError: The size of tensor a (8) must match the size of tensor b (33) at non-singleton dimension 0\n"


def shown(printer, *arguments, **more) -> str:
    file = io.StringIO()
    printer(Console(file=file, width=40, highlight=False), *arguments, **more)
    return file.getvalue()


def golden(text: str) -> str:
    return dedent(text).lstrip("\n")


def test_a_plan_is_a_diff():
    plan = Plan(
        WISH,
        (
            Change(
                ChangeKind.UNIT,
                "replace k26.service",
                ("@@ -1 +1 @@", "-  --budget 32 [a]", "+  --budget 16"),
            ),
            Change(ChangeKind.RESTART, "restart: the unit file changes"),
        ),
    )
    assert shown(print_plan, plan) == golden(
        """
        ct200 k26.service  sglang-0.5.11-ddtree bbbbbbbbbbbb
          ~ replace k26.service
              @@ -1 +1 @@
              -  --budget 32 [a]
              +  --budget 16
          ~ restart: the unit file changes
        """
    )


def test_a_plan_names_the_overlay_of_its_bundle():
    plan = Plan(replace(WISH, overlay="ddtree_sglang 0.1.0"), ())
    head = "ct200 k26.service  sglang-0.5.11-ddtree bbbbbbbbbbbb with ddtree_sglang 0.1.0"
    assert shown(print_plan, plan).splitlines()[0] == head
    assert (plan.to_json()["overlay"], Plan(WISH, ()).to_json()["overlay"]) == ("ddtree_sglang 0.1.0", None)


def test_an_empty_plan_says_so():
    assert shown(print_plan, Plan(WISH, ())).splitlines()[1] == "  nothing to change"


def test_results_end_with_cause_state_and_the_next_command():
    failed = RolledBack(
        "the deployment failed and was rolled back to aaaaaaaaaaaa",
        host="ct200",
        phase="rollback",
        state="release aaaaaaaaaaaa serves again",
        hint="ddtree-ops logs ct200",
        details=("why: it died",),
    )
    results = [
        Result("b300", "k26", Outcome.UNCHANGED, plan=Plan(WISH, ()), seconds={"push": 0.5}),
        Result(
            "ct200",
            "k26",
            Outcome.ROLLED_BACK,
            error=failed,
            evidence=Path("/e/ct200"),
            seconds={"wait": 61.0},
        ),
    ]
    assert shown(print_results, results) == golden(
        """
        b300 unchanged in 0.5s: sglang-0.5.11-ddtree bbbbbbbbbbbb, nothing to change
        ct200 rolled-back in 1m01s
          ct200: rollback: the deployment failed and was rolled back to aaaaaaaaaaaa
            why: it died
            state: release aaaaaaaaaaaa serves again
            next:  ddtree-ops logs ct200
          evidence: /e/ct200
        """
    )


def test_checks_show_a_hint_only_where_something_is_to_be_done():
    checks = [
        CheckResult("smoke.text", Verdict.PASS, "reads as text", host="ct200", hint="not shown"),
        CheckResult("signatures", Verdict.INCONCLUSIVE, "no lines", host="ct200", hint="look there"),
        CheckResult("smoke", Verdict.SKIPPED, "no answer", host="b300"),
        CheckResult("smoke", Verdict.FAIL, "died", host="b300"),
    ]
    assert shown(print_checks, checks) == golden(
        """
        ✓ ct200    smoke.text  reads as text
        ? ct200    signatures  no lines
            next: look there
        - b300     smoke       no answer
        ✗ b300     smoke       died
        """
    )
    assert shown(print_checks, []) == ""


def test_a_diagnosis_names_the_host_the_cause_and_the_line():
    text = shown(print_diagnosis, diagnose(read_log(io.BytesIO(CRASH))), host="ct200")
    first, *rest = text.splitlines()
    assert first.startswith("ct200: ddtree-graph-size: ")
    assert any(line.startswith("  remedy: ") for line in rest)
    assert any(line.startswith("    line 1: RuntimeError: The size of tensor a (8)") for line in rest)


def test_nothing_read_is_not_nothing_found():
    assert "nothing to judge by" in shown(print_diagnosis, diagnose(()), host="ct200")


def test_a_result_as_json_is_complete_and_carries_its_exit_code():
    result = Result("h", "s", Outcome.FAILED, error=RolledBack("no"), seconds={"wait": 1.23456})
    assert result.to_json() == {
        "schema": 1,
        "host": "h",
        "service": "s",
        "outcome": "failed",
        "plan": None,
        "checks": [],
        "diagnosis": None,
        "evidence": None,
        "confirm_until": None,
        "error": "no",
        "exit_code": 7,
        "seconds": {"wait": 1.235},
    }


def test_hosts_that_were_not_started_are_told_once_for_each_reason():
    from ddtree_ops.errors import Inconclusive

    def skipped(host: str) -> Result:
        error = Inconclusive(
            "not started: the canary a failed", host=host, state="nothing was changed", hint="mend"
        )
        return Result(host, "s", Outcome.SKIPPED, error=error)

    stream = io.StringIO()
    failed = Result(
        "a", "s", Outcome.FAILED, error=CheckFailed("it died", host="a", state="it is down", hint="look")
    )
    print_results(Console(file=stream, width=200), [failed, skipped("b"), skipped("c")])
    assert stream.getvalue().splitlines()[-4:] == [
        "b, c skipped: not started: the canary a failed",
        "  state: nothing was changed",
        "  next:  mend",
        "3 in all: 2 skipped, 1 failed",
    ]


class TestLinesOnATerminal:
    """Prose is folded between words; a command is pasted, so it stays in one piece."""

    COMMAND = "ddtree-ops -i lab deploy ct200 --set health.window=0.5s --set 'a=b c' --lock-wait 30m"

    def lines(self, text: str, width: int = 60) -> list[str]:
        file = io.StringIO()
        say(Console(file=file, width=width, force_terminal=True, color_system=None), Text(text), indent=2)
        return file.getvalue().splitlines()

    def test_a_command_is_never_broken(self):
        text = f"next:  try again when that is done, or wait for it: {self.COMMAND}; who: ddtree-ops lock status ct200"
        lines = self.lines(text)
        assert any(self.COMMAND in line for line in lines), lines
        assert any("ddtree-ops lock status ct200" in line for line in lines), lines
        assert " ".join(line.strip() for line in lines) == text

    def test_prose_is_folded_and_a_long_path_left_whole(self):
        path = f"/root/{'evidence-' * 9}/journal.log"
        lines = self.lines(f"the engine died while it took its graphs, and what it said is kept here: {path}")
        assert max(len(line) for line in lines if path not in line) <= 60
        assert any(line.strip() == path for line in lines), lines
        assert lines[1].startswith("    ")


def test_a_router_that_was_never_deployed_says_how_to():
    state = UnitState.parse(
        {"Id": "sglang-router.service", "LoadState": "not-found", "ActiveState": "inactive"}
    )
    worker = WorkerView("ct200/k26", "http://h:1", None)
    view = RouterView("front", "ct200", "sglang-router.service", state, False, False, (worker,))
    said = shown(print_router_view, view)
    assert "never deployed; next: ddtree-ops router deploy front" in said
    assert "restart it" not in said
