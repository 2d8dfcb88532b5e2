"""Killed hosts that take their time: patience follows what ends, and what is left is named."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddtree_ops.errors import LabError
from ddtree_ops.lab import container
from ddtree_ops.lab.container import Container, Record

KILL = os.kill


class Clock:
    """A clock that only waiting moves: ten seconds each time.

    :param then: what happens meanwhile.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.then: Callable[[], object] = lambda: None

    def sleep(self, _seconds: float) -> None:
        self.now += 10.0
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep, time=time.time)
    monkeypatch.setattr(container, "time", fake)
    return clock


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who was sent SIGKILL; nobody is."""
    found: list[int] = []
    monkeypatch.setattr(container.os, "kill", lambda pid, number: found.append(pid))
    return found


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids in the host's cgroup."""
    found: list[int] = []
    monkeypatch.setattr(
        container,
        "_members",
        lambda group: [str(pid) for pid in found] if group.name == "inner.service" else [],
    )
    return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    """A host whose cgroup is a folder with one inside."""
    monkeypatch.setattr(container, "hierarchies", lambda: [tmp_path / "cgroup"])
    monkeypatch.setattr(container, "_SYSTEMD", tmp_path / "nowhere")
    host = Container("gpu03", "ddtree-lab-test-gpu03", tmp_path / "gpu03")
    (group,) = host.cgroups
    (group / "inner.service").mkdir(parents=True)
    return host


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that is stopped."""
    with subprocess.Popen(["sleep", "600"]) as process:
        KILL(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process.pid
        KILL(process.pid, signal.SIGKILL)


def test_processes_that_end_one_after_the_other_are_waited_for_however_long_all_of_them_take(
    host: Container, clock: Clock, left: list[int], killed: list[int]
) -> None:
    left += range(5_000_001, 5_000_061)
    said: list[str] = []
    clock.then = lambda: left.pop(0)
    host.sweep(said.append)
    assert clock.now - 1000.0 == 600.0
    assert not host.cgroups[0].exists()
    assert set(killed) == set(range(5_000_001, 5_000_061))
    assert said[0] == (
        f"killed, waiting for {host.cgroups[0]}: 58 processes left, 20 s so far: "
        "5000003, ended by now; 5000004, ended by now; 5000005, ended by now"
    )
    assert len(said) == 29


def test_processes_that_do_not_end_are_named_with_their_state_and_what_to_type(
    host: Container, clock: Clock, left: list[int], killed: list[int], stopped: int
) -> None:
    left += [0, stopped]
    with pytest.raises(LabError) as caught:
        host.sweep()
    error = caught.value
    assert str(error) == (
        f"gpu03: lab: {host.cgroups[0]} does not go away: 2 processes left, none ended for 190 s"
    )
    assert error.details == (
        "a process outside this PID namespace",
        f"{stopped} sleep, state T (stopped)",
    )
    assert error.hint == f"ps -o pid,stat,wchan:32,args -p {stopped}; ddtree-ops lab down when they are gone"
    assert subprocess.run(["ps", "-o", "pid,stat,wchan:32,args", "-p", str(stopped)]).returncode == 0
    assert set(killed) == {stopped}, "process 0 would be this process and all of its group"


def test_a_host_that_begins_processes_for_ever_is_given_up(
    host: Container, clock: Clock, left: list[int], killed: list[int]
) -> None:
    left.append(5_000_001)

    def again() -> None:
        left[0] += 1

    clock.then = again
    with pytest.raises(LabError, match="1 process left, after 1210 s"):
        host.sweep()


def test_an_empty_cgroup_that_is_refused_to_be_removed_says_why(
    host: Container, clock: Clock, left: list[int]
) -> None:
    inner = host.cgroups[0] / "inner.service"
    (inner / "file").touch()
    with pytest.raises(LabError, match="no processes left") as caught:
        host.sweep()
    assert caught.value.details == (f"{inner}: Directory not empty",)
    assert caught.value.hint == "ddtree-ops lab down when they are gone"


def test_a_removal_that_is_refused_at_first_is_tried_again(
    host: Container, clock: Clock, left: list[int]
) -> None:
    file = host.cgroups[0] / "inner.service" / "file"
    file.touch()
    clock.then = lambda: file.unlink(missing_ok=True)
    host.sweep()
    assert not host.cgroups[0].exists()


def test_a_killed_host_that_does_not_end_is_named_too(
    host: Container, clock: Clock, stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = container.start_ticks(stopped)
    assert ticks is not None
    monkeypatch.setattr(container.signal, "pidfd_send_signal", lambda handle, number: None)
    record = Record(stopped, ticks, "", 0.0, "overlay", "image", "127.0.0.1")
    said: list[str] = []
    with pytest.raises(LabError, match=f"process {stopped} does not go away") as caught:
        host.stop(record, 0.0, said.append)
    assert caught.value.details == (f"{stopped} sleep, state T (stopped)",)
    assert said
