"""The readiness machine on golden cases and recorded logs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddtree_ops.checks.readiness import PHASES, Failed, Outcome, Readiness, Ready, TimedOut, Waiting, duration

CASES = Path(__file__).parent / "cases" / "readiness"
DATA = Path(__file__).parents[1] / "data"
RUNNING = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "SubState": "running",
    "InvocationID": "a1",
    "NRestarts": "0",
    "MainPID": "77",
}
NAMES: dict[type[Any], str] = {Waiting: "waiting", Ready: "ready", Failed: "failed", TimedOut: "timed-out"}


def log_lines(name: str) -> list[str]:
    return (DATA / "logs" / name).read_bytes().decode("utf-8", "replace").split("\n")


def check(expected: dict[str, Any], outcome: Outcome, machine: Readiness) -> None:
    for key, value in expected.items():
        match key:
            case "outcome":
                assert NAMES[type(outcome)] == value, outcome
            case "kind":
                assert isinstance(outcome, Failed | TimedOut)
                assert outcome.kind == value, outcome
            case "reason":
                assert isinstance(outcome, Failed | TimedOut)
                assert re.search(value, outcome.reason), outcome
            case "phase":
                assert machine.phase == value
            case "describe":
                assert re.search(value, machine.describe()), machine.describe()
            case "fraction":
                assert value[0] <= machine.fraction <= value[1], machine.fraction
            case "http_possible":
                assert machine.http_possible is value
            case _:
                pytest.fail(f"unknown expectation {key}")


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yaml")), ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = yaml.safe_load(path.read_text("utf-8"))
    machine = Readiness(started_at=0.0, **case["settings"])
    unit: dict[str, str] = {}
    expectations, last, fraction = 0, 0.0, 0.0
    for feed in case["feeds"]:
        now = float(feed.pop("at"))
        assert now >= last, "feeds are in order of time"
        last = now
        ((kind, value),) = ((key, item) for key, item in feed.items() if key != "step")
        match kind:
            case "unit":
                unit |= value
                machine.feed_unit(unit, now)
            case "line":
                machine.feed_line(value, now)
            case "log":
                for index, line in enumerate(log_lines(value)):
                    machine.feed_line(line, now + index * feed["step"])
            case "http":
                machine.feed_http(value[0], value[1], now)
            case "tick":
                machine.feed_tick(value, now)
            case "expect":
                expectations += 1
                check(value, machine.poll(now), machine)
            case _:
                pytest.fail(f"unknown feed {kind}")
        assert machine.fraction >= fraction
        fraction = machine.fraction
    assert expectations


def test_a_recorded_journal_that_fails_while_loading() -> None:
    machine = Readiness(2700, 600, 0.0)
    machine.feed_unit(RUNNING, 0.0)
    for index, raw in enumerate(
        (DATA / "journal" / "fail-loading-no-draft-backend.json").read_text("utf-8").splitlines()
    ):
        message = json.loads(raw)["MESSAGE"]
        text = bytes(message).decode("utf-8", "replace") if isinstance(message, list) else message
        machine.feed_line(text, index * 0.01)
        assert not isinstance(machine.poll(index * 0.01), Ready)
    assert machine.phase == "drafter"
    assert "Scheduler hit an exception" in machine.last_words
    machine.feed_unit(
        RUNNING
        | {"ActiveState": "failed", "SubState": "failed", "MainPID": "0", "Result": "signal"}
        | {"ExecMainCode": "2", "ExecMainStatus": "9"},
        3.0,
    )
    outcome = machine.poll(3.0)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "unit"


def test_phase_seconds_add_up_to_the_whole() -> None:
    machine = Readiness(2700, 600, 0.0)
    machine.feed_unit(RUNNING, 0.0)
    lines = log_lines("h200-dflash.log")
    for index, line in enumerate(lines):
        machine.feed_line(line, index * 1.0)
    seconds = machine.phase_seconds()
    assert tuple(seconds) == PHASES
    assert sum(seconds.values()) == pytest.approx(len(lines) - 1.0)


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "shards"), [("k2-nvfp4", (119, 119)), ("k25-int4", (64, 64)), ("k25-int4-sm120fix", (64, 64))]
)
def test_logs_of_eight_ranks(name: str, shards: tuple[int, int]) -> None:
    path = Path(__file__).parents[3] / "shared" / "corpus" / "operator-logs" / f"{name}.log"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    machine = Readiness(2700, 600, 0.0)
    machine.feed_unit(RUNNING, 0.0)
    ready_at = None
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n")):
        machine.feed_line(line, float(number))
        if ready_at is None and isinstance(machine.poll(float(number)), Ready):
            ready_at = number
            assert "fired up" in line
    assert ready_at is not None
    assert machine.shards == shards
    assert {"weights", "kv-cache", "warm-up", "fired-up"} <= set(machine.phase_seconds())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (192, "3m12s"), (3720, "1h02m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


LINES = st.sampled_from([line for line in log_lines("h200-dflash.log") if line.strip()]) | st.text(
    max_size=60
)


@given(st.lists(LINES, max_size=60))
def test_any_order_of_lines_is_monotone_and_never_ready_without_the_word(lines: list[str]) -> None:
    machine = Readiness(2700, 600, 0.0)
    machine.feed_unit(RUNNING, 0.0)
    phase, fraction = 0, 0.0
    for now, line in enumerate(lines):
        machine.feed_line(line, float(now))
        assert PHASES.index(machine.phase) >= phase
        assert 1.0 > machine.fraction >= fraction
        phase, fraction = PHASES.index(machine.phase), machine.fraction
        if isinstance(machine.poll(float(now)), Ready):
            assert any("fired up and ready to roll" in seen for seen in lines[: now + 1])
