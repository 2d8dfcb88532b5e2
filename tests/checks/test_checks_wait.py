"""When progress is told, without a host."""

from __future__ import annotations

from ddtree_ops.checks.wait import GAP, HEARTBEAT, Pace


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
