"""What a bench puts back, a unit that dies under its points, and a server that does not say what it runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_ops.checks.bench import measuring
from ddtree_ops.checks.bench.points import Configuration, Point
from ddtree_ops.checks.engine import ServerInfo
from ddtree_ops.checks.speculation import TOO_LITTLE
from ddtree_ops.deploy.earlier import way_back
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.errors import (
    CheckFailed,
    ExitCode,
    Inconclusive,
    Interrupted,
    LockHeld,
    PreflightError,
    UnreachableError,
)
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook import bench
from ddtree_ops.results import CheckResult, Verdict
from ddtree_ops.runreport import RunReport
from ddtree_ops.service.state import UnitState

TREE = Configuration("ddtree", 16, 4)
ORIGINAL = {"id": "20261130T080000.000-abcdef", "release": "a" * 64, "unit_sha256": "u", "passed": True}


def one_target(said: list[str]) -> Any:
    service = Service(unit="s.service", runtime="r", venv="/v", model="/m")
    target = Target(host=Host(name="h"), service=service, runtime=RuntimeSpec(name="r"))
    book = bench._Book(RunReport("bench", "1", "now"), lambda report: None)
    one = bench._Target(
        target,
        (TREE,),
        bench.BenchOptions(),
        book,
        lambda target: nullcontext(SimpleNamespace(host="h", acquire_lock=lambda *given, **more: None)),
        lambda event: said.append(event.message),
        Safety(command="bench"),
    )
    one.holder = SimpleNamespace(check_lock=lambda *given: SimpleNamespace(held=True))  # type: ignore[assignment]
    return one


def activation(release: str, command: str, verdict: Verdict = Verdict.PASS) -> Any:
    made = new_activation(
        release=release * 64, unit_sha256="u", plan="", who="", origin="", reason="deploy", command=command
    )
    return replace(made, id=f"{release}-{command}", verdict=verdict)


def test_begun_after_one_that_was_killed_it_notes_what_ran_before_that_and_says_so():
    said: list[str] = []
    one = one_target(said)
    past = History((activation("a", "deploy"), activation("b", "bench")))
    assert one._original(past)["id"] == "a-deploy"
    assert one.left
    assert "the last bench was killed" in said[0]
    assert "activation a-deploy" in said[0]


def test_without_anything_to_put_back_it_refuses_and_touches_nothing(monkeypatch):
    one = one_target([])
    monkeypatch.setattr(bench, "read_history", lambda *given: History((activation("b", "bench"),)))
    monkeypatch.setattr(one, "_put_back", lambda: pytest.fail("there is nothing to put back"))
    one.run()
    (error,) = one.errors
    assert error.exit_code is ExitCode.CHECK_FAILED
    assert error.hint.startswith("ddtree-ops deploy h")


@pytest.mark.parametrize("wrong", ["", "release bbbbbbbbbbbb runs"])
def test_what_was_put_back_is_compared_with_what_ran_before(monkeypatch, wrong):
    one = one_target([])
    one._write(facts={"original": ORIGINAL})
    monkeypatch.setattr(one, "_history", lambda: History((activation("b", "bench"),)))
    monkeypatch.setattr(one, "_play", lambda playbook, target: SimpleNamespace(error=None, checks=()))
    monkeypatch.setattr(one, "_other_than", lambda original: wrong)
    one._put_back()
    assert [error.message for error in one.errors] == (
        [f"{wrong}, and not activation {ORIGINAL['id']}"] if wrong else []
    )
    assert all(f"rollback h --to {ORIGINAL['id']}" in error.hint for error in one.errors)


USELESS = CheckResult("smoke.speculation", Verdict.FAIL, "useless", facts={TOO_LITTLE: True})
SILENT = CheckResult("smoke.completion", Verdict.FAIL, "500")
OPEN = CheckResult("preflight.disk", Verdict.INCONCLUSIVE, "not known")


@pytest.mark.parametrize(
    ("checks", "little"),
    [
        ((OPEN, USELESS), True),
        ((USELESS, SILENT), False),
        ((SILENT,), False),
        ((OPEN,), False),
        ((), False),
    ],
)
def test_what_gains_too_little_serves_all_the_same(checks, little):
    assert bench.gains_too_little(checks) is little


def played_back(
    monkeypatch: pytest.MonkeyPatch, *results: Any, past: History | None = None, wrong: str = ""
) -> tuple[Any, list[tuple[Any, bool]]]:
    """A bench whose attempts to go back end so; where each went, and whether it was armed."""
    one, played, left = one_target([]), [], list(results)
    past = past or History((activation("b", "bench"),))

    def play(playbook: Any, target: Target) -> Any:
        played.append((playbook.steps[0].arguments.get("to"), one.safety.rollback))
        return left.pop(0)

    one._write(facts={"original": ORIGINAL})
    monkeypatch.setattr(one, "_history", lambda: past)
    monkeypatch.setattr(one, "_other_than", lambda original: wrong)
    monkeypatch.setattr(one, "_play", play)
    one._put_back()
    return one, played


def ended(error: Any = None, *checks: CheckResult) -> Any:
    return SimpleNamespace(error=error, checks=checks)


def test_put_back_it_stays_though_its_speculation_gains_nothing_any_more(monkeypatch):
    one, played = played_back(monkeypatch, ended(CheckFailed("useless"), USELESS))
    (error,) = one.errors
    assert error.message == "what ran before the bench is back, and fails its own rules: useless"
    assert (error.state, error.hint) == ("it serves, as before the bench", "ddtree-ops smoke h")
    assert played == [(ORIGINAL["id"], False)], "and no configuration of the bench takes its place"
    assert one.safety.rollback


def test_where_it_does_not_serve_any_more_what_passed_last_does(monkeypatch):
    """By its id: a rollback that names none leaves out what a bench measured, and here there is nothing else."""
    again = f"ddtree-ops rollback h --to {ORIGINAL['id']}"
    measured = replace(activation("b", "bench"), id="20261130T090000.000-bbbbbb")
    past = History(
        (
            replace(activation("a", "deploy"), id=ORIGINAL["id"]),
            measured,
            replace(activation("a", "bench", Verdict.FAIL), reason="rollback"),
        )
    )
    one, played = played_back(monkeypatch, ended(CheckFailed("500", hint=again), SILENT), ended(), past=past)
    (error,) = one.errors
    assert error.message == "500"
    assert error.state.startswith(f"what passed last serves in its place, activation {measured.id} of ")
    assert error.state.endswith(", which a bench measured")
    assert error.hint.startswith("ddtree-ops logs h")
    assert played == [(ORIGINAL["id"], False), (measured.id, True)]
    assert way_back(past, ("a" * 64, "u"), played[-1][0]) == measured
    with pytest.raises(PreflightError, match="but for what a bench measured"):
        way_back(past, ("a" * 64, "u"))


def test_an_interruption_in_its_place_ends_the_whole_bench(monkeypatch):
    past = History((activation("b", "bench"),))
    one, played = played_back(monkeypatch, ended(CheckFailed("500")), ended(Interrupted("stop")), past=past)
    assert [type(error) for error in one.errors] == [Interrupted, CheckFailed]
    assert len(played) == 2


def test_where_nothing_else_passed_it_says_so_and_tries_nothing(monkeypatch):
    past = History(
        (replace(activation("a", "deploy"), id=ORIGINAL["id"]), activation("c", "bench", Verdict.FAIL))
    )
    one, played = played_back(monkeypatch, ended(CheckFailed("500"), SILENT), past=past)
    (error,) = one.errors
    assert error.details[-1] == "nothing else ever passed here"
    assert ORIGINAL["id"] not in error.hint
    assert played == [(ORIGINAL["id"], False)]


def test_an_interrupted_way_back_is_not_followed_by_another(monkeypatch):
    _, played = played_back(monkeypatch, ended(Interrupted("interrupted")))
    assert played == [(ORIGINAL["id"], False)]


@pytest.mark.parametrize(
    ("wrong", "state", "hint"),
    [
        ("", "what ran before the bench runs again, and is not validated", "(validates it"),
        (
            "release bbbbbbbbbbbb runs",
            "release bbbbbbbbbbbb runs; what ran before the bench was not put back",
            f"ddtree-ops rollback h --to {ORIGINAL['id']}",
        ),
    ],
)
def test_interrupted_on_the_way_back_it_says_what_the_host_runs(monkeypatch, wrong, state, hint):
    past = History((replace(activation("a", "bench"), verdict=None, reason="rollback"),))
    one, _ = played_back(monkeypatch, ended(Interrupted("interrupted")), past=past, wrong=wrong)
    (error,) = one.errors
    assert (error.state, hint in error.hint) == (state, True), error.hint
    monkeypatch.setattr(one, "_history", lambda: History((activation("a", "bench"),)))
    if not wrong:
        assert one._interrupted_back(ORIGINAL)[0] == "what ran before the bench is back", (
            "it had passed already"
        )


def test_what_was_touched_is_said_over_an_errors_own_nothing_was_changed(monkeypatch):
    one, _ = played_back(monkeypatch, ended(LockHeld("ann holds it", state="nothing was changed")))
    (error,) = one.errors
    assert error.state == "a configuration of the bench may serve"


def test_an_interruption_under_an_error_on_the_way_back_is_one(monkeypatch):
    one = one_target([])
    one._write(facts={"original": ORIGINAL})
    monkeypatch.setattr(one, "_other_than", lambda original: "another")

    def broken() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise UnreachableError("the session ended")  # noqa: B904

    monkeypatch.setattr(one, "_history", broken)
    one._put_back()
    assert [error.exit_code for error in one.errors] == [ExitCode.INTERRUPTED]


@pytest.mark.parametrize(
    ("shown", "holds"),
    [
        ({}, True),
        ({"ActiveState": "activating", "SubState": "auto-restart", "MainPID": "0"}, False),
        ({"InvocationID": "b" * 32}, False),
    ],
)
def test_a_unit_that_waits_to_be_started_again_holds_no_more(monkeypatch, shown, holds):
    healthy = {
        "LoadState": "loaded",
        "ActiveState": "active",
        "SubState": "running",
        "MainPID": "7",
        "InvocationID": "a" * 32,
    }
    state = UnitState.parse({**healthy, **shown})
    monkeypatch.setattr(bench, "UnitControl", lambda session, unit: SimpleNamespace(state=lambda: state))
    assert one_target([])._holds(None, "a" * 32) is holds


@pytest.mark.parametrize(
    ("info", "error", "verdict"),
    [
        (None, Inconclusive, Verdict.INCONCLUSIVE),
        (ServerInfo("0.5.11", None, None, None, None, {}), CheckFailed, Verdict.FAIL),
    ],
)
def test_points_of_what_nobody_verified_never_pass(monkeypatch, info, error, verdict):
    one = one_target([])
    control = SimpleNamespace(entries=lambda **given: ())
    monkeypatch.setattr(measuring, "UnitControl", lambda session, unit: control)
    monkeypatch.setattr(measuring.Bench, "_info", lambda self: info)
    with pytest.raises(error) as raised:
        measuring.Bench(SimpleNamespace(), one.target, one.report, (), 1, 8).start_figures(TREE)
    one._not_measured(raised.value, TREE, (Point(TREE, 1), Point(TREE, 8)))
    assert [check.verdict for check in one.written.checks] == [verdict, verdict]
