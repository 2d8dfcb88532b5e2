"""Which run of a unit is explained: over the recorded journals of a real systemd."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ddtree_ops.errors import UsageError
from ddtree_ops.service.journal import parse_entries
from ddtree_ops.service.runs import RUN_MESSAGES, Run, choose, parse_runs, whole_id

DATA = Path(__file__).resolve().parents[1] / "data" / "journal"
NOW = datetime(2026, 11, 29, 15, 0, tzinfo=UTC)
YOUNG = timedelta(minutes=30)


def at(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


def recorded(*names: str) -> tuple[Run, ...]:
    entries = [entry for name in names for entry in parse_entries([(DATA / f"{name}.json").read_bytes()])]
    return parse_runs(entry for entry in entries if entry.message_id in RUN_MESSAGES)


CRASHED = Run("c" * 32, at(-20), at(-10), failed=True, restarts=3)
PLAIN = Run("p" * 32, at(-9.99))


@pytest.mark.parametrize(
    ("name", "planned", "crashed", "restarts"),
    [
        ("crash-then-auto-restart", False, True, 1),
        ("crash-while-serving", False, True, 0),
        ("fail-loading-no-draft-backend", False, True, 0),
        ("stop-control-group", True, False, 0),
        ("stop-mixed", True, False, 0),
        ("stop-mixed-drain-never-ends", True, False, 0),
        ("stop-mixed-force-shutdown", True, False, 0),
    ],
)
def test_recorded_runs(name: str, planned: bool, crashed: bool, restarts: int) -> None:
    (run,) = recorded(name)
    assert (run.planned, run.crashed, run.restarts) == (planned, crashed, restarts)
    assert run.begin is not None and run.end is not None and run.begin < run.end


def test_runs_come_newest_first_and_the_one_systemctl_shows_before_all() -> None:
    runs = recorded("stop-mixed", "crash-while-serving", "stop-control-group")
    assert [run.begin for run in runs] == sorted((run.begin for run in runs), reverse=True)
    entries = list(parse_entries([(DATA / "stop-mixed.json").read_bytes()]))
    assert parse_runs(entries, "f" * 32)[0].id == "f" * 32
    assert parse_runs([], "f" * 32) == (Run("f" * 32),)
    assert parse_runs([]) == ()


def test_a_fresh_automatic_restart_tells_nothing_the_crash_is_explained() -> None:
    for which in ("current", "previous"):
        runs = (PLAIN, CRASHED) if which == "current" else (Run("n" * 32, at(-1)), PLAIN, CRASHED)
        chosen = choose(runs, which, now=NOW, young=YOUNG)
        assert chosen is not None
        assert chosen.run == CRASHED and chosen.until == CRASHED.end
        assert "cccccccccccc that crashed" in chosen.note
        assert f"--invocation {PLAIN.id}" in chosen.note and "automatic restart 3" in chosen.note


def test_a_restarted_run_that_has_lived_is_explained_itself_and_the_crash_is_named() -> None:
    chosen = choose((PLAIN, CRASHED), "current", now=at(60), young=YOUNG)
    assert chosen is not None and chosen.run == PLAIN and chosen.until is None
    assert f"--invocation {CRASHED.id}" in chosen.note
    later = choose((PLAIN, CRASHED), "current", now=at(60 * 30), young=YOUNG)
    assert later is not None and later.note == ""


def test_a_restart_that_somebody_asked_for_is_explained_itself() -> None:
    by_hand = Run("c" * 32, at(-20), at(-10), failed=True)
    chosen = choose((PLAIN, by_hand), "current", now=NOW, young=YOUNG)
    assert chosen is not None and chosen.run == PLAIN


def test_a_restarted_run_that_crashed_too_is_the_one_explained() -> None:
    again = Run("a" * 32, at(-9), at(-8), failed=True, restarts=4)
    chosen = choose((again, CRASHED), "current", now=NOW, young=YOUNG)
    assert chosen is not None and chosen.run == again and "does not run" in chosen.note


def test_a_planned_stop_is_no_crash_and_an_id_is_taken_at_its_word() -> None:
    stopped = Run("s" * 32, at(-50), at(-40), planned=True, failed=True)
    chosen = choose((stopped,), "current", now=NOW, young=YOUNG)
    assert chosen is not None and chosen.note == "" and chosen.until == stopped.end
    named = choose((PLAIN, CRASHED), PLAIN.id, now=NOW, young=YOUNG)
    assert named is not None and named.run == PLAIN and named.note == ""
    foreign = choose((PLAIN,), "e" * 32, now=NOW, young=YOUNG)
    assert foreign is not None and foreign.run == Run("e" * 32)


def test_a_run_without_a_known_end_was_over_when_the_next_began() -> None:
    lost = Run("o" * 32, at(-30))
    chosen = choose((PLAIN, lost), "previous", now=NOW, young=YOUNG)
    assert chosen is not None and chosen.until == PLAIN.begin
    assert choose((), "current", now=NOW, young=YOUNG) is None
    assert choose((PLAIN,), "previous", now=NOW, young=YOUNG) is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("failed failed", "crash 2 in a row; systemd has given up restarting it (start limit)"),
        ("activating auto-restart", "crash 2 in a row; systemd is about to start it again"),
        ("", "crash 2 in a row"),
    ],
)
def test_a_loop_of_crashes_is_counted_and_what_systemd_does_about_it_is_said(state: str, said: str) -> None:
    last = Run("a" * 32, at(-9), at(-8), failed=True)
    chosen = choose((last, CRASHED), "current", now=NOW, young=YOUNG, state=state)
    assert chosen is not None and chosen.run == last and chosen.note.endswith(said)
    once = choose((last,), "current", now=NOW, young=YOUNG, state="failed failed")
    assert once is not None and once.note.endswith("failed at 2026-11-29 14:52:00Z")


IDS = ("b214324bcdf8" + "0" * 20, "b21432ffffff" + "1" * 20, "c" * 32)


def test_a_run_is_named_by_the_first_digits_of_its_id() -> None:
    assert whole_id("b214324bcdf8", IDS) == IDS[0]
    assert whole_id("B214324BCDF8", IDS) == IDS[0]
    assert whole_id("cccccc", IDS) == IDS[2]
    assert whole_id("d" * 32, IDS) == "d" * 32, "systemd may have forgotten it, and the journal not"


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("b21432", "2 runs begin with 'b21432'", "b214324bcdf8, b21432ffffff"),
        ("ddddddd", "no run that is known begins with", "b214324bcdf8, b21432ffffff, cccccccccccc"),
        ("ccccc", "the first six", "cccccccccccc"),
        ("last", "is not an invocation id", "cccccccccccc"),
    ],
)
def test_what_names_no_run_is_refused_with_those_that_are_known(text: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        whole_id(text, IDS)
    assert hint in refused.value.hint
