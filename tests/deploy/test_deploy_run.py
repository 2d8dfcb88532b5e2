"""A playbook over several hosts: every host to its end, one exit code; sessions are real, to this machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddtree_ops.deploy.deployment import Outcome, Result
from ddtree_ops.errors import (
    CheckFailed,
    ConfigError,
    ExitCode,
    HealthTimeout,
    Inconclusive,
    LockHeld,
    OpsError,
    RolledBack,
    UnreachableError,
    UsageError,
)
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.playbook.models import Plain, Playbook
from ddtree_ops.playbook.run import exit_code, run_playbook
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


def test_a_probe_without_an_answer_is_an_error_with_what_it_said():
    from ddtree_ops.deploy.preflight import parse_facts
    from ddtree_ops.errors import RemoteError

    with pytest.raises(RemoteError) as caught:
        parse_facts(b"", b"Traceback\nKeyError: 'x'\n")
    assert caught.value.details[-1] == "KeyError: 'x'"


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
