"""When progress is told, without a host."""

from __future__ import annotations

import threading

import pytest

from ddtree_ops.checks.wait import GAP, HEARTBEAT, Pace, wait_ready
from ddtree_ops.inventory.models import Host, RuntimeSpec, Service, Target
from ddtree_ops.remote.session import Session


def test_changes_are_told_at_most_four_a_second_and_none_is_lost() -> None:
    pace = Pace()
    told = [shard for shard in range(100) if pace.due(shard, shard * 0.05)]
    assert told == list(range(0, 100, 5))
    assert GAP == 0.25
    assert pace.due(99, 5.0), "the last change is told once the gap is over"


def test_silence_is_broken_by_a_heartbeat() -> None:
    pace = Pace()
    told = [second for second in range(100) if pace.due("weights", float(second))]
    assert told == [0, 30, 60, 90]
    assert HEARTBEAT == 30.0


def test_a_wait_that_is_interrupted_while_its_threads_start_is_cleaned_up_all_the_same(
    local_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(name="s", unit="t.service", runtime="r", venv="/v", model="/m")
    target = Target(
        host=Host(name="a", services={"s": service}), service=service, runtime=RuntimeSpec(name="r")
    )

    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree_ops.checks.wait.threading.Thread.start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wait_ready(local_session, target, report=lambda event: None)
