"""A playbook over several hosts: every host to its end, one exit code; sessions are real, to this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddtree_ops.deploy.confirming import Lock, break_lock
from ddtree_ops.deploy.deployment import Deployment
from ddtree_ops.deploy.guard import Safety
from ddtree_ops.deploy.identity import origin, who
from ddtree_ops.deploy.outcome import Outcome, Result
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    HealthTimeout,
    Inconclusive,
    LockHeld,
    LockLost,
    OpsError,
    RolledBack,
    UnreachableError,
    UsageError,
)
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook.models import Plain, Playbook
from ddtree_ops.playbook.run import _after_failure, exit_code, run_playbook
from ddtree_ops.remote import connect_local
from ddtree_ops.remote.session import Session
from ddtree_ops.results import Event, EventKind
from ddtree_ops.service.layout import Layout

PREFLIGHT = Playbook(name="t", steps=(Plain(kind="preflight"),))


@dataclass
class Recorder:
    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def _target(root: Path, host: str, **service: object) -> Target:
    made = Service.model_validate(
        {"name": "s", "unit": "t.service", "runtime": "r", "venv": "/v", "model": "/m", **service}
    )
    return Target(
        host=Host(name=host, deploy_root=str(root / host), services={"s": made}),
        service=made,
        runtime=RuntimeSpec(name="r"),
    )


def _connect(target: Target) -> Session:
    if target.host.name.startswith("gone"):
        raise UnreachableError("refused the connection")
    return connect_local(target.host.name)


def test_a_locked_and_an_unreachable_host_are_both_told_in_the_order_asked_for(tmp_path):
    targets = [_target(tmp_path, name) for name in ("gone", "busy", "gone2")]
    events = Recorder()
    with connect_local("other") as other:
        other.acquire_lock(Layout.of(targets[1]).lock, {"who": "ann", "origin": "desk"})
        results = run_playbook(PREFLIGHT, targets, connect=_connect, report=events)
    assert [result.host for result in results] == ["gone", "busy", "gone2"]
    assert {result.outcome for result in results} == {Outcome.FAILED}
    busy = results[1].error
    assert isinstance(busy, LockHeld)
    assert "ann on desk" in str(busy)
    assert (busy.host, busy.phase, busy.state) == ("busy", "preflight", "nothing was changed")
    gone = results[0].error
    assert gone is not None
    assert (gone.host, gone.phase, gone.state) == ("gone", "connect", "nothing was changed")
    assert exit_code(results) is ExitCode.UNREACHABLE
    assert {event.host for event in events.events if event.kind is EventKind.FAIL} == {
        "gone",
        "busy",
        "gone2",
    }


def test_who_is_waited_for_is_named_at_once_and_in_a_line_of_its_own(tmp_path):
    target, events = _target(tmp_path, "h"), Recorder()
    with connect_local("other") as other:
        other.acquire_lock(Layout.of(target).lock, {"who": "ann", "origin": "desk"})
        safety = Safety(lock_wait=0.2)
        (result,) = run_playbook(PREFLIGHT, [target], connect=_connect, report=events, safety=safety)
    assert isinstance(result.error, LockHeld)
    (note,) = (event for event in events.events if event.kind is EventKind.NOTE)
    assert "waiting: ann on desk holds the lock" in note.message


def test_what_fails_under_a_lock_that_somebody_broke_is_a_lost_lock(tmp_path):
    target = _target(tmp_path, "h")
    layout = Layout.of(target)
    with connect_local("other") as other:

        def report(event: Event) -> None:
            if event.kind is EventKind.FAIL:
                break_lock(target, other, Lock("h", "s", layout.unit, *_held(other, layout), None))
                other.acquire_lock(layout.lock, {"who": "bob", "origin": "desk", "command": "deploy"})

        (result,) = run_playbook(PREFLIGHT, [target], connect=_connect, report=report)
        assert other.check_lock(layout.lock).held is False
        assert _held(other, layout)[0]["who"] == "bob"
    assert isinstance(result.error, LockLost)
    assert (result.error.exit_code, result.error.host, result.error.phase) == (6, "h", "preflight")
    text = result.error.render()
    assert "was lost: bob on desk holds the lock of t.service" in text
    assert f"broken by {who()} on {origin()} at " in text
    assert "seen before that was noticed: " in text
    assert "state: somebody else is in charge of t.service now; nothing more was touched from here" in text


def test_after_a_start_that_came_to_nothing_the_state_is_what_was_seen_last(tmp_path):
    """Not what systemd said when it was started."""
    target = _target(tmp_path, "h")
    with connect_local("h") as session:
        deployment = Deployment(target, session, Recorder())
        deployment.changed = deployment.operated = True
        deployment.frame.state_left = "t.service is active (running)"
        died = CheckFailed("it died", state="t.service is failed (failed)")
        assert _after_failure(deployment, PREFLIGHT, died) is died
        assert died.state == "t.service is failed (failed)"
        deployment.operated = False
        assert _after_failure(deployment, PREFLIGHT, died).state == "t.service is active (running)"


def _held(session: Session, layout: Layout) -> tuple[dict[str, object], float]:
    found = session.check_lock(layout.lock)
    return dict(found.holder or {}), found.left_s


def test_the_lock_is_free_again_when_the_session_is_gone(tmp_path):
    target = _target(tmp_path, "h")
    first = connect_local("h")
    assert first.acquire_lock(Layout.of(target).lock, {"who": "ann"}) is None
    first.close()
    (result,) = run_playbook(PREFLIGHT, [target], connect=_connect, report=Recorder())
    assert not isinstance(result.error, LockHeld)


def test_a_unit_that_cannot_be_written_is_found_before_any_host_is_touched(tmp_path):
    targets = [_target(tmp_path, "a"), _target(tmp_path, "b", environment={"PYTHONPATH": "/x"})]

    def never(target: Target) -> Session:
        raise AssertionError(target.name)

    with pytest.raises(ConfigError, match="PYTHONPATH"):
        run_playbook(PREFLIGHT, targets, connect=never, report=Recorder())


def test_a_defect_of_ours_is_an_error_of_that_host_with_its_place_and_the_others_go_on(tmp_path):
    def report(event: Event) -> None:
        if event.host == "a" and event.kind is EventKind.START:
            raise ZeroDivisionError("by HF_TOKEN=hf_secret")

    targets = [_target(tmp_path, "a"), _target(tmp_path, "gone")]
    first, second = run_playbook(PREFLIGHT, targets, connect=_connect, report=report)
    assert first.error is not None
    text = first.error.render()
    assert "a: preflight: internal error: ZeroDivisionError" in text
    assert "test_deploy_run.py" in text
    assert "hf_secret" not in text
    assert isinstance(second.error, UnreachableError)
    assert exit_code([first, second]) is ExitCode.ERROR


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([], ExitCode.INCONCLUSIVE),
        ([None], ExitCode.OK),
        ([None, Inconclusive("")], ExitCode.INCONCLUSIVE),
        ([Inconclusive(""), RolledBack("")], ExitCode.ROLLED_BACK),
        ([RolledBack(""), CheckFailed("")], ExitCode.CHECK_FAILED),
        ([CheckFailed(""), HealthTimeout("")], ExitCode.HEALTH_TIMEOUT),
        ([HealthTimeout(""), LockHeld("")], ExitCode.LOCK_HELD),
        ([LockHeld(""), UnreachableError("")], ExitCode.UNREACHABLE),
        ([UnreachableError(""), ConfigError("")], ExitCode.CONFIG),
        ([ConfigError(""), UsageError("")], ExitCode.USAGE),
        ([None, UsageError("")], ExitCode.USAGE),
        ([UsageError(""), OpsError("")], ExitCode.ERROR),
    ],
)
def test_one_exit_code_for_all(errors, code):
    results = [Result("h", "s", Outcome.FAILED if error else Outcome.PASSED, error=error) for error in errors]
    assert exit_code(results) is code


def test_the_lock_of_a_service_is_given_back_before_the_next_service_of_its_host_begins(tmp_path):
    one = _target(tmp_path, "h")
    two = one.model_copy(
        update={"service": one.service.model_copy(update={"name": "s2", "unit": "u.service"})}
    )
    held = []

    def report(event: Event) -> None:
        if event.kind is EventKind.START and event.phase == "preflight":
            held.append(Path(Layout.of(one).lock).exists())

    run_playbook(PREFLIGHT, [one, two], connect=_connect, report=report)
    assert held == [False, False]
