"""Units under a real systemd and journald, over a real session."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ddtree_ops.errors import Inconclusive, NotDeployed, RemoteError
from ddtree_ops.service.control import UnitControl
from ddtree_ops.service.ending import EndingKind
from ddtree_ops.service.layout import Layout
from ddtree_ops.service.state import UnitState
from ddtree_ops.service.unit import render_unit

pytestmark = pytest.mark.lab


def until(control: UnitControl, wanted: Any, patience: float = 300.0) -> UnitState:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        state = control.state()
        if wanted(state):
            return state
        time.sleep(0.05)
    raise AssertionError(f"still {state.describe()}")


def heard(control: UnitControl, text: str, patience: float = 300.0) -> None:
    """Wait until the journal holds ``text``."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if any(text in entry.message for entry in control.entries()):
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came")


def test_install_is_idempotent(bench: Any) -> None:
    target = bench.target()
    control = bench.install(target)
    control.start()
    path, text = Layout.of(target).unit_path, render_unit(target)
    before = bench.session.round_trips
    assert control.install(path, text) is False
    assert bench.session.round_trips == before + 1
    assert control.install(path, text.replace("Restart=no", "Restart=always")) is True
    assert control.state().need_daemon_reload is False
    bench.session.write_file(path, text.encode())
    assert control.state().need_daemon_reload is True
    assert control.install(path, text) is False, "the file is right already"
    assert control.state().need_daemon_reload is False, "yet systemd had to read it again"


def test_install_refuses_what_systemd_cannot_load(bench: Any) -> None:
    target = bench.target()
    control = UnitControl(bench.session, target.service.unit)
    with pytest.raises(RemoteError) as caught:
        control.install(
            Layout.of(target).unit_path,
            render_unit(target).replace("ExecStart=", "ExecStop="),
        )
    assert "bad-setting" in caught.value.message
    assert caught.value.details


def test_verify_installs_nothing(bench: Any) -> None:
    target = bench.target()
    bench.install(bench.target())
    control = UnitControl(bench.session, target.service.unit)
    assert control.verify(render_unit(target)) == ()
    problems = control.verify(render_unit(target).replace("KillMode=", "KillMood="))
    assert any("KillMood" in line for line in problems)
    assert not control.state().exists


def test_start_stop_restart(bench: Any) -> None:
    target = bench.target()
    control = bench.install(target)
    assert control.enable() is True
    assert control.enable() is False
    before = bench.session.round_trips
    started = control.start()
    assert bench.session.round_trips == before + 2
    assert started.changed and not started.reset and started.state.running
    assert started.state.unit_file_state == "enabled"
    assert started.state.exec_main_start is not None
    heard(control, "up in mode idle")
    again = control.start()
    assert not again.changed and again.state.stable_against(started.state) is None
    before = bench.session.round_trips
    stopped = control.stop()
    assert bench.session.round_trips <= before + 4
    assert stopped.changed and stopped.ending.kind is EndingKind.DRAINED
    assert stopped.state.failed and stopped.state.result == "signal", "and yet no crash"
    assert not stopped.ending.crashed
    assert "no crash" in stopped.describe()
    assert not control.stop().changed
    second = control.restart()
    assert second.changed and second.reset == "signal"
    assert second.stop is not None and not second.stop.changed
    assert "InvocationID" in (second.state.stable_against(started.state) or "")
    heard(control, "up in mode idle")
    third = control.restart()
    assert third.stop is not None and third.stop.changed
    assert control.invocations()[:3] == (
        third.state.invocation_id,
        second.state.invocation_id,
        started.state.invocation_id,
    )


def test_stop_that_times_out(bench: Any) -> None:
    control = bench.install(bench.target(args={"mode": "leaks"}, health={"stop_timeout": "1s"}))
    control.start()
    heard(control, "up in mode leaks")
    report = control.stop()
    assert report.ending.kind is EndingKind.TIMED_OUT and report.ending.remaining == 1
    assert report.state.result == "timeout"
    assert report.seconds >= 1.0
    assert "TimeoutStopSec" in report.describe()


def test_a_stop_that_is_under_way_is_cut_short(bench: Any) -> None:
    control = bench.install(bench.target(args={"mode": "leaks"}, restart={"policy": "always"}))
    control.start()
    heard(control, "up in mode leaks")
    said: list[str] = []
    bench.session.run(["systemctl", "stop", "--no-block", control.unit], check=True)
    until(control, lambda state: state.active_state == "deactivating")
    report = control.stop(patience=0.0, drain=lambda drain: said.append(drain.describe()))
    assert report.ending.kind is EndingKind.KILLED and not report.ending.crashed
    assert report.killed_after == 0.0 and "by SIGKILL at once, as asked for" in report.describe()
    assert control.state().active_state in {"inactive", "failed"}


def test_a_drain_is_followed(bench: Any) -> None:
    control = bench.install(bench.target(args={"mode": "leaks"}, health={"stop_timeout": "20s"}))
    control.start()
    heard(control, "up in mode leaks")
    said: list[str] = []
    report = control.stop(patience=0.5, drain=lambda drain: said.append(drain.describe()))
    assert said == ["draining: 1 request remaining"]
    assert report.killed_after == 0.5 and report.ending.remaining == 1


def test_stop_without_a_drain(bench: Any) -> None:
    control = bench.install(bench.target(args={"mode": "plain"}, kill_mode="control-group"))
    control.start()
    heard(control, "up in mode plain")
    assert control.stop().ending.kind is EndingKind.KILLED


def test_a_crash_is_seen_and_found(bench: Any) -> None:
    control = bench.install(bench.target(args={"mode": "crash"}))
    started = control.start()
    state = until(control, lambda state: state.failed)
    assert (state.result, state.exec_main_status) == ("signal", 9)
    assert "SIGKILL (9)" in state.describe()
    assert state.stable_against(started.state) is not None
    heard(control, "Failed with result")
    result = control.search(r"size of tensor", invocation="current")
    assert [entry.source for entry in result.matches] == ["process"]
    assert {entry.source for entry in control.entries(invocation="current")} == {"process", "systemd"}
    assert control.start().reset == "signal"


def test_crash_loop_until_the_start_limit(bench: Any) -> None:
    control = bench.install(
        bench.target(args={"mode": "crash"}, restart={"policy": "on-failure", "delay": 0.1, "burst": 3})
    )
    first = control.start().state
    seen = until(control, lambda state: state.auto_restarting or state.n_restarts or state.start_limit_hit)
    assert not seen.starting or seen.n_restarts
    state = until(control, lambda state: state.start_limit_hit or (state.failed and state.n_restarts >= 2))
    assert state.n_restarts == 3 or state.start_limit_hit
    heard(control, "Start request repeated too quickly")
    assert state.stable_against(first) is not None
    assert len(control.invocations()) >= 3
    previous = control.invocation("previous")
    assert previous is not None
    assert {entry.invocation for entry in control.entries(invocation="previous")} == {previous}
    bench.session.write_file(
        Layout.of(bench.target(unit=control.unit)).unit_path,
        render_unit(bench.target(unit=control.unit)).encode(),
    )
    control.session.run(["systemctl", "daemon-reload"], check=True)
    repaired = control.start()
    assert repaired.reset and repaired.state.running, "a start limit once hit refuses even a repaired unit"


def test_stop_ends_a_restart_loop(bench: Any) -> None:
    control = bench.install(
        bench.target(args={"mode": "crash"}, restart={"policy": "on-failure", "delay": "10m", "burst": 3})
    )
    control.start()
    crashed = until(control, lambda state: state.auto_restarting)
    assert not crashed.starting and not crashed.running and "auto-restart" in crashed.describe()
    report = control.stop()
    assert report.changed and report.looping and report.ending.crashed
    assert "restart loop" in report.describe() and "SIGKILL" in report.describe()
    assert control.state().active_state in {"inactive", "failed"}


def test_bad_command_line_is_not_repeated(bench: Any) -> None:
    control = bench.install(
        bench.target(args={"mode": 2}, restart={"policy": "on-failure", "delay": 0.1, "burst": 3})
    )
    control.start()
    state = until(control, lambda state: state.failed)
    assert (state.n_restarts, state.exec_main_status) == (0, 2)
    assert "argparse" in state.describe()


def test_missing_binary(bench: Any) -> None:
    control = bench.install(bench.target(venv="/opt/no such venv"))
    with pytest.raises(RemoteError) as caught:
        control.start()
    assert "203" in caught.value.state
    assert any("No such file" in line for line in caught.value.details)


def test_missing_unit(bench: Any) -> None:
    control = UnitControl(bench.session, "no-such-unit.service")
    state = control.state()
    assert not state.exists and not state.running
    for action in (control.start, control.stop, control.restart):
        with pytest.raises(NotDeployed, match="does not exist"):
            action()
    with pytest.raises(Inconclusive) as caught:
        control.search("x")
    assert "does not exist on this host" in caught.value.message
    with pytest.raises(Inconclusive):
        control.invocation("current")


def test_nothing_in_the_time_asked_for(bench: Any) -> None:
    control = bench.install(bench.target())
    control.start()
    heard(control, "up in mode")
    with pytest.raises(Inconclusive) as caught:
        control.search("x", until="@1")
    assert "in the time asked for" in caught.value.message
    assert control.search("up in mode", since="10 minutes ago").matches


@pytest.mark.parametrize("which", ["bench", "french_bench"])
def test_noise(which: str, request: pytest.FixtureRequest) -> None:
    """Bytes that are no UTF-8, a line longer than journald keeps in one piece, progress bars; also in French."""
    bench = request.getfixturevalue(which)
    control = bench.install(bench.target(args={"mode": "noisy"}))
    cursor = control.start().cursor
    heard(control, "end of noise")
    entries = control.entries(after_cursor=cursor)
    texts = [entry.message for entry in entries]
    assert entries.damaged == 0
    assert "gr\ufffd\ufffde \ufffd\ufffd" in texts
    assert "x" * 100_000 + " size of tensor" in texts
    assert "Loading: 100% | 64/64" in texts
    stopped = control.stop()
    assert stopped.ending.kind is EndingKind.DRAINED
    assert any(entry.message.startswith("Stopping") for entry in stopped.entries), "C locale"


def test_follow(bench: Any) -> None:
    control = bench.install(bench.target())
    cursor = control.cursor()
    with control.follow(after_cursor=cursor) as follower:
        control.start()
        seen = []
        for entry in follower:
            seen.append(entry)
            if "up in mode" in entry.message:
                break
        assert seen[0].source == "systemd" and seen[-1].source == "process"
        control.stop()
        for entry in follower:
            if "Failed with result" in entry.message:
                break
        assert not follower.ended
        assert follower.damaged == 0
    assert follower.ended
    with control.follow(lines=0) as quiet:
        assert quiet.get(0.2) == []


def test_who_owns_a_port(bench: Any, lab: Any) -> None:
    control = bench.install(bench.target())
    (owner,) = control.port_owner(22022, lab.hosts["ct200"].address)
    assert (owner.unit, owner.command) == ("ssh.service", "sshd")
    assert owner.address == lab.hosts["ct200"].address
    assert control.port_owner(1) == ()


def test_suppressed_messages_are_reported(bench: Any) -> None:
    target = bench.target(args={"mode": "chatty"})
    control = bench.install(target)
    text = render_unit(target).replace(
        "LogRateLimitIntervalSec=0", "LogRateLimitIntervalSec=1s\nLogRateLimitBurst=2"
    )
    control.install(Layout.of(target).unit_path, text)
    control.start()
    until(control, lambda state: state.running)
    time.sleep(1.5)
    bench.session.run(["systemctl", "kill", "--signal=SIGTERM", control.unit], check=True)
    until(control, lambda state: state.failed)
    heard(control, "Suppressed")
    result = control.search("no such text", invocation="current")
    assert result.suppressed > 0 and not result.complete
