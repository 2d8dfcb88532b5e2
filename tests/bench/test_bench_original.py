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
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.history import History, new_activation
from ddtree_ops.errors import CheckFailed, ExitCode, Inconclusive
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook import bench
from ddtree_ops.results import Verdict
from ddtree_ops.runreport import RunReport
from ddtree_ops.service.state import UnitState

TREE = Configuration("ddtree", 16, 4)
ORIGINAL = {"id": "20261130T080000.000-abcdef", "release": "a" * 64, "unit_sha256": "u", "passed": True}


def one_target(said: list[str]) -> Any:
    service = Service(unit="s.service", runtime="r", venv="/v", model="/m")
    target = Target(host=Host(name="h"), service=service, runtime=RuntimeSpec(name="r"))
    book = bench._Book(RunReport("bench", "1", "now"), lambda report: None)
    return bench._Target(
        target,
        (TREE,),
        bench.BenchOptions(),
        book,
        lambda target: nullcontext(SimpleNamespace()),
        lambda event: said.append(event.message),
        Safety(command="bench"),
    )


def activation(release: str, command: str, verdict: Verdict = Verdict.PASS) -> Any:
    made = new_activation(
        release=release * 64, unit_sha256="u", plan="", who="", origin="", reason="deploy", command=command
    )
    return replace(made, id=f"{release}-{command}", verdict=verdict)


def test_begun_after_one_that_was_killed_it_notes_what_ran_before_that_and_says_so(monkeypatch):
    said: list[str] = []
    one = one_target(said)
    past = History((activation("a", "deploy"), activation("b", "bench")))
    monkeypatch.setattr(one, "_history", lambda: past)
    assert one._original()["id"] == "a-deploy"
    assert one.left
    assert "the last bench was killed" in said[0]
    assert "activation a-deploy" in said[0]


def test_without_anything_to_put_back_it_refuses_and_touches_nothing(monkeypatch):
    one = one_target([])
    monkeypatch.setattr(one, "_history", lambda: History((activation("b", "bench"),)))
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
    monkeypatch.setattr(one, "_play", lambda playbook, target: SimpleNamespace(error=None))
    monkeypatch.setattr(one, "_other_than", lambda original: wrong)
    one._put_back()
    assert [error.message for error in one.errors] == (
        [f"{wrong}, and not activation {ORIGINAL['id']}"] if wrong else []
    )
    assert all(f"rollback h --to {ORIGINAL['id']}" in error.hint for error in one.errors)


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
