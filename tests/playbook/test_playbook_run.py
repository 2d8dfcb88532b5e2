"""A run over several hosts, in batches; sessions are real, with agents on this machine."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.errors import ExitCode, Inconclusive, Interrupted, UnreachableError
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook import run as run_module
from ddtree_ops.playbook.models import Plain, Playbook
from ddtree_ops.playbook.rollout import Rollout, rollout_of
from ddtree_ops.playbook.run import _interruption, exit_code, run_playbook
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.results import RUN_END, Event, EventKind

# Nothing was activated, so there is nothing to go back from: the one step that passes on any machine.
PASSES = Playbook(name="t", steps=(Plain(kind="rollback"),))


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
    """Connects to this machine, except for hosts with telling names; counts those connected at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.connected: list[str] = []
        self.guard = threading.Lock()

    def connect(self, target: Target) -> Session:
        name = target.host.name
        with self.guard:
            self.connected.append(name)
        if name.startswith("gone"):
            raise UnreachableError("refused the connection")
        if name.startswith("odd"):
            raise ZeroDivisionError("HF_TOKEN=hf_secret1")
        return connect_local(name)

    def report(self, event: Event) -> None:
        self.events.append(event)

    def run(self, targets: list[Target], rollout: Rollout | None = None) -> list[Result]:
        return run_playbook(PASSES, targets, connect=self.connect, report=self.report, rollout=rollout)

    def notes(self) -> list[str]:
        return [event.message for event in self.events if event.phase == "rollout"]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def _outcomes(results: list[Result]) -> dict[str, str]:
    return {result.host: result.outcome.value for result in results}


def test_what_nobody_expected_is_one_hosts_failure_and_the_others_run_on(desk: Desk, tmp_path: Path) -> None:
    results = desk.run(_targets(tmp_path, "a odd b gone"))
    assert _outcomes(results) == {"a": "passed", "odd": "failed", "b": "passed", "gone": "failed"}
    odd = results[1].error
    assert odd is not None
    assert odd.message.startswith("internal error: ZeroDivisionError")
    assert any("test_playbook_run.py" in line for line in odd.details)
    assert "hf_secret1" not in odd.render()
    assert exit_code(results) is ExitCode.ERROR
    ends = {event.host: event.kind for event in desk.events if event.phase == RUN_END}
    assert ends == {
        "a": EventKind.DONE,
        "b": EventKind.DONE,
        "odd": EventKind.FAIL,
        "gone": EventKind.FAIL,
    }


def test_a_failed_canary_keeps_the_rest_from_being_started(desk: Desk, tmp_path: Path) -> None:
    results = desk.run(_targets(tmp_path, "gone a b"), rollout_of(canary=1, max_fail="100%"))
    assert _outcomes(results) == {"gone": "failed", "a": "skipped", "b": "skipped"}
    assert desk.connected == ["gone"]
    skipped = results[1].error
    assert isinstance(skipped, Inconclusive)
    assert skipped.message == "not started: the canary gone failed"
    assert (skipped.state, skipped.hint) == (
        "nothing was changed",
        "mend that, then run the same command again",
    )
    assert results[1].to_json()["exit_code"] == 8
    assert exit_code(results) is ExitCode.UNREACHABLE
    assert desk.notes() == [
        "batch 1 of 2: gone",
        "stopped: the canary gone failed; not started: a, b",
    ]


def test_batches_follow_each_other_and_a_failure_ends_the_run_after_its_batch(
    desk: Desk, tmp_path: Path
) -> None:
    results = desk.run(_targets(tmp_path, "a b gone c d e"), rollout_of(serial="1,2"))
    assert _outcomes(results) == {
        "a": "passed",
        "b": "passed",
        "gone": "failed",
        "c": "skipped",
        "d": "skipped",
        "e": "skipped",
    }
    assert desk.connected[0] == "a"
    assert sorted(desk.connected) == ["a", "b", "gone"]


def test_failures_that_are_allowed_do_not_end_it(desk: Desk, tmp_path: Path) -> None:
    results = desk.run(_targets(tmp_path, "gone a gone2 b"), rollout_of(serial="1", max_fail="1"))
    assert _outcomes(results) == {"gone": "failed", "a": "passed", "gone2": "failed", "b": "skipped"}
    assert results[3].error is not None
    assert results[3].error.message == "not started: gone, gone2 failed, more than --max-fail 1 allows"


def test_no_more_hosts_are_under_way_than_asked_for(desk: Desk, tmp_path: Path) -> None:
    inside: set[str] = set()
    most: list[int] = []
    real = desk.connect

    def connect(target: Target) -> Session:
        with desk.guard:
            inside.add(target.host.name)
            most.append(len(inside))
        session = real(target)
        close = session.close

        def closing() -> None:
            with desk.guard:
                inside.discard(target.host.name)
            close()

        session.close = closing  # type: ignore[method-assign]
        return session

    desk.connect = connect  # type: ignore[method-assign]
    results = desk.run(_targets(tmp_path, "a b c d e"), rollout_of(parallel=2))
    assert set(_outcomes(results).values()) == {"passed"}
    assert max(most) == 2


@pytest.mark.parametrize("trouble", [BrokenPipeError("nobody reads"), ZeroDivisionError("ours")])
def test_a_display_that_fails_fails_no_host(desk: Desk, tmp_path: Path, trouble: Exception) -> None:
    real = desk.report

    def report(event: Event) -> None:
        real(event)
        if event.host in ("a", "gone"):
            raise trouble

    desk.report = report  # type: ignore[method-assign]
    results = desk.run(_targets(tmp_path, "a b gone"))
    assert _outcomes(results) == {"a": "passed", "b": "passed", "gone": "failed"}
    assert exit_code(results) is ExitCode.UNREACHABLE
    assert results[2].error is not None and "refused the connection" in results[2].error.message


def test_ctrl_c_leaves_what_was_not_started_as_skipped_and_interrupted(desk: Desk, tmp_path: Path) -> None:
    targets = _targets(tmp_path, "a b")
    real = desk.report

    def report(event: Event) -> None:
        real(event)
        if event.phase == RUN_END:
            raise KeyboardInterrupt

    desk.report = report  # type: ignore[method-assign]
    results = desk.run(targets, rollout_of(serial="1"))
    assert _outcomes(results) == {"a": "passed", "b": "skipped"}
    assert isinstance(results[1].error, Interrupted)
    assert results[1].error.hint == "run the same command again", "there is nothing to mend"
    assert exit_code(results) is ExitCode.INTERRUPTED
    assert Outcome.SKIPPED.value == "skipped"


@pytest.mark.parametrize(("canary", "told"), [(1, False), (2, True), (9, True)])
def test_a_canary_of_all_hosts_is_told(tmp_path, canary, told):
    desk = Desk()
    desk.run(_targets(tmp_path, "gone1 gone2"), rollout_of(canary=canary))
    assert any("nothing comes after it" in event.message for event in desk.events) is told


def test_an_interrupted_command_is_told_with_its_options():
    def left(changed: bool, command: str = "deploy", switched: str = "") -> str:
        safety = Safety(command=command, again=f"ddtree-ops {command} {{host}} --set a=1")
        deployment = SimpleNamespace(
            target=SimpleNamespace(host=SimpleNamespace(name="h"), name="h"),
            hold=SimpleNamespace(safety=safety, left=""),
            frame=SimpleNamespace(step="wait"),
            activation=SimpleNamespace(id=switched) if switched else None,
            next_step="",
            changed=changed,
        )
        return _interruption(deployment).hint  # type: ignore[arg-type]

    assert left(False) == "ddtree-ops deploy h --set a=1"
    assert left(True).startswith("ddtree-ops deploy h --set a=1   (goes on")
    assert left(True, "rollback", "ID").startswith("ddtree-ops rollback h --to ID   (")


def _interrupted_badly(*_: object) -> None:
    """Ctrl-C, and what cleans up fails: the failure is all that arrives."""
    try:
        raise KeyboardInterrupt
    finally:
        raise RuntimeError("cannot join thread before it is started")


def _refused_badly(*_: object) -> None:
    try:
        raise KeyboardInterrupt
    finally:
        raise UnreachableError("the session ended") from None


@pytest.mark.parametrize("trouble", [_interrupted_badly, _refused_badly])
def test_an_interruption_that_a_failure_hides_is_one_and_nothing_is_judged_by_it(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: object
) -> None:
    playbook = Playbook(name="t", steps=(Plain(kind="start"),), on_failure=(Plain(kind="rollback"),))
    undone: list[object] = []
    monkeypatch.setattr(Deployment, "rollback", undone.append)
    (result,) = run_playbook(
        playbook,
        _targets(tmp_path, "a"),
        connect=desk.connect,
        report=desk.report,
        perform={"start": trouble},  # type: ignore[dict-item]
    )
    assert (result.outcome, exit_code([result])) == (Outcome.INTERRUPTED, ExitCode.INTERRUPTED)
    assert isinstance(result.error, Interrupted)
    assert not undone


@pytest.mark.parametrize("trouble", [_interrupted_badly, _refused_badly])
def test_an_interruption_while_it_connects_says_that_nothing_was_changed(
    desk: Desk, tmp_path: Path, trouble: object
) -> None:
    desk.connect = trouble  # type: ignore[method-assign, assignment]
    (result,) = desk.run(_targets(tmp_path, "a"))
    assert isinstance(result.error, Interrupted)
    assert (result.error.state, result.error.hint) == ("nothing was changed", "ddtree-ops deploy a")


def test_after_an_interruption_no_further_service_of_the_host_is_begun(desk: Desk, tmp_path: Path) -> None:
    (first,) = _targets(tmp_path, "a")
    other = first.service.model_copy(update={"name": "other", "unit": "o.service"})
    second = first.model_copy(update={"service": other})
    begun: list[str] = []

    def start(deployment: object, step: object) -> None:
        begun.append(deployment.target.service.name)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    results = run_playbook(
        Playbook(name="t", steps=(Plain(kind="start"),)),
        [first, second],
        connect=desk.connect,
        report=desk.report,
        perform={"start": start},
    )
    assert begun == ["s"]
    assert [result.outcome for result in results] == [Outcome.INTERRUPTED, Outcome.INTERRUPTED]
    assert results[1].error is not None and results[1].error.state == "nothing was changed"


def test_a_second_interruption_hides_nothing_of_what_was_left(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = run_module._interruption, []

    def interrupted_again(deployment: Deployment) -> Interrupted:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return real(deployment)

    monkeypatch.setattr(run_module, "_interruption", interrupted_again)
    (result,) = run_playbook(
        Playbook(name="t", steps=(Plain(kind="start"),)),
        _targets(tmp_path, "a"),
        connect=desk.connect,
        report=desk.report,
        perform={"start": _interrupted_badly},  # type: ignore[dict-item]
    )
    assert isinstance(result.error, Interrupted)
    assert result.error.message == "interrupted during the start", "not: before it was begun"


def test_an_interruption_while_a_session_closes_is_told_to_who_goes_on(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: Session) -> None:
        raise KeyboardInterrupt

    came = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Session, "close", close)
        (result,) = run_playbook(
            PASSES, _targets(tmp_path, "a"), connect=desk.connect, report=desk.report, interrupted=came
        )
    assert (result.outcome, came.is_set()) == (Outcome.PASSED, True)


def test_a_second_interruption_loses_no_hosts_result(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = run_module._Run.interrupt, threading.Barrier(3)
    closed: list[int] = []

    def again(self: run_module._Run) -> None:
        closed.append(1)
        if len(closed) < 3:
            raise KeyboardInterrupt
        real(self)

    def start(deployment: Deployment, step: object) -> None:
        begun.wait(30)
        deployment.session.run(["sleep", "60"])

    def gathered(*_: object, **__: object) -> object:
        if not closed:
            begun.wait(30)
            raise KeyboardInterrupt
        return real_wait(*_, **__)  # type: ignore[arg-type]

    real_wait = run_module.wait
    monkeypatch.setattr(run_module, "wait", gathered)
    monkeypatch.setattr(run_module._Run, "interrupt", again)
    results = run_playbook(
        Playbook(name="t", steps=(Plain(kind="start"),)),
        _targets(tmp_path, "a b"),
        connect=desk.connect,
        report=desk.report,
        perform={"start": start},
    )
    assert [result.outcome for result in results] == [Outcome.INTERRUPTED, Outcome.INTERRUPTED]
